"""How Megatron names what is ours under another name."""

LAYERS = "decoder.layers."
# The TE spec's names, which the local spec takes for its checkpoints too, and ours.
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def canonical(name: str) -> str:
    """A tensor's name with norms as modules of their own."""
    for theirs, ours in NORMS.items():
        name = name.replace(theirs, ours)
    return name
