"""The vocabulary projection, in high precision."""

from torch import Tensor, nn

from megafp8.layers.backend import LayerContext
from megafp8.layers.parameters import local
from megafp8.numerics import linear
from megafp8.parallel.collectives import copy_to_group, gather_sequence


class OutputLayer(nn.Module):
    """[s(/tp), b, h] -> logits [s, b, padded_vocab/tp].

    Args:
        parameter: canonical name of the table; the embedding's own for tied embeddings, whose two
            copies start equal and are kept equal by the training step.
    """

    def __init__(self, context: LayerContext, parameter: str) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = context.mesh.tp, context.sequence_parallel
        self.weight = context.factory(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for this rank's part of the vocabulary."""
        x = gather_sequence(x, self.tp) if self.sequence_parallel else copy_to_group(x, self.tp)
        return linear(x, local(self.weight))
