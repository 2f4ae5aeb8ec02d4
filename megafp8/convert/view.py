"""A model as all formats meet: our parameters by canonical name, read one at a time."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.tensors import buffer_of
from megafp8.config import ModelShape, RunConfig
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.errors import CheckpointError, ConfigurationError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelView:
    """A model whose weights are still in its files.

    Attributes:
        path: what was opened, for messages.
        config: the model as a configuration; also the data section that goes with it.
        shape: its sizes.
        dtype: of the weights as they were stored first; what export keeps.
        read: canonical parameter name -> global tensor, of `dtype` or wider without loss.
        scales: FP8 scale state, `fp8.<module>.<role>.scale` and so on -> fp32 tensor.
        carried: files for beside the weights (tokenizer, generation settings).
        hf_config: `config.json` of the Hugging Face model that it came from; empty if none.
        notes: what of the source is not converted, or was changed on the way; a sentence each.
    """

    path: Path
    config: RunConfig
    shape: ModelShape
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    carried: tuple[Path, ...] = ()
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_config(
    path: Path, model: Mapping[str, Any], data: Mapping[str, Any], dtype: torch.dtype
) -> RunConfig:
    """A configuration for a model without a run: sizes from its files, a short training run.

    Args:
        path: of the model, for messages.
        model: fields of section `model`.
        data: fields of section `data`.
        dtype: of the weights; bf16 and fp16 set the precision.

    Raises:
        CheckpointError: the sizes contradict each other.
    """
    precision = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    values = {
        "model": dict(model),
        "data": dict(data),
        "precision": precision,
        # To go on training from; what a person would look at first is written out.
        "optimizer": {"lr": 1e-5},
        "training": {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 1000},
    }
    try:
        return RunConfig.from_dict(values)
    except ConfigurationError as error:
        raise CheckpointError(f"{path}: {error}") from None


def with_padding(view: ModelView, multiple: int) -> ModelView:
    """The same model with another padding of its vocabulary; new rows are zero."""
    if multiple == view.config.model.make_vocab_size_divisible_by:
        return view
    model = view.config.model.model_copy(update={"make_vocab_size_divisible_by": multiple})
    config = view.config.model_copy(update={"model": model})
    shape = ModelShape.from_config(config, view.shape.vocab_size)

    def read(name: str) -> Tensor:
        tensor = view.read(name)
        if name in (EMBEDDING, OUTPUT):
            return pad_rows(tensor[: shape.vocab_size], shape.padded_vocab_size)
        return tensor

    return dataclasses.replace(view, config=config, shape=shape, read=read)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """[v, h] -> [rows, h] with zeros below; converters never store anything else there."""
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded


def listed(names: Iterable[str], limit: int = 3) -> str:
    """Names for a message: the first few, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


@dataclass
class Checksums:
    """CRC-32 of each parameter's values, the same in every format that stores them.

    Taken over the fp32 values without the padding of the vocabulary, so that a bf16 file and fp32
    masters of the same values agree.
    """

    shape: ModelShape
    values: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Note the values of one parameter."""
        if name in (EMBEDDING, OUTPUT):
            tensor = tensor[: self.shape.vocab_size]
        checksum = 0
        # In pieces: an fp32 copy of a bf16 embedding would double the memory a conversion needs.
        for piece in tensor.detach().contiguous().view(-1).split(1 << 22):
            checksum = zlib.crc32(buffer_of(piece.float()), checksum)
        self.values[name] = checksum

    def total(self) -> str:
        """One number for the model: eight hexadecimal digits over names and values."""
        lines = (f"{name}={value:08x};" for name, value in sorted(self.values.items()))
        return f"{zlib.crc32(''.join(lines).encode()):08x}"
