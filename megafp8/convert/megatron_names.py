"""How Megatron names what is ours under another name, and what of its checkpoints stays behind."""

from collections.abc import Collection

from megafp8.convert.view import listed

LAYERS = "decoder.layers."
EXTRA_STATE = "_extra_state"
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


def notes_of(optimizer: Collection[str], extra: Collection[str]) -> list[str]:
    """What of a checkpoint stays behind, a sentence each.

    Args:
        optimizer: tensors or files of optimizer state.
        extra: modules' extra state that holds anything.
    """
    optimizer_note = "optimizer state is not converted: left out "
    extra_note = "FP8 state of TransformerEngine is not converted, scales start anew: left out "
    pairs = ((optimizer_note, optimizer), (extra_note, extra))
    return [note + listed(names) for note, names in pairs if names]
