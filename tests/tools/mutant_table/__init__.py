"""Mistakes that somebody could make, one a mutant, and the tests that have to notice.

`before` occurs exactly once in its file; `tests/test_mutant_table.py` holds the table to that.
`tests/tools/mutants.py` plants them. A mutant that no test can notice says why in `survives`.
"""

from tests.tools.mutant_table.checkpoint import CHECKPOINT
from tests.tools.mutant_table.mutant import Mutant
from tests.tools.mutant_table.numerics import NUMERICS
from tests.tools.mutant_table.parallel import PARALLEL
from tests.tools.mutant_table.train import TRAIN

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = (*NUMERICS, *PARALLEL, *TRAIN, *CHECKPOINT)
