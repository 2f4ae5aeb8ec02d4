"""How long tests wait for what should have come long before."""

PATIENCE_S = 300.0  # a machine with other work may be ten times slower; only a hang gets here
