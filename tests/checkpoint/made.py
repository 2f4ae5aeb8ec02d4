"""Checkpoints made in one process, with values that depend on the names alone."""

import dataclasses
import zlib
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.holdings import plan_holdings
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.checkpoint.reshard import TargetLayout, layout_fields, target_run
from megafp8.checkpoint.tensors import dtype_of
from megafp8.config import ModelShape
from tests.model.small import FP8, VOCAB, small_config

HISTORY = FP8["fp8_amax_history_len"]


def value(name: str, entry: TensorEntry) -> Tensor:
    if name.endswith(".scale"):  # that of its window
        stem, window = name.removesuffix("scale"), TensorEntry((*entry.shape, HISTORY), entry.dtype)
        largest = 57344.0 if "grad_output" in name else 448.0
        return torch.tensor(largest) / value(f"{stem}amax_history", window).amax(-1)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.rand(entry.shape, generator=generator) + 0.5
    return (values.ceil() if name.endswith(".step") else values).to(dtype_of(entry))


def entries_of(shape: ModelShape) -> dict[str, TensorEntry]:
    entries = {"rng.cpu": TensorEntry((16,), "uint8"), "empty": TensorEntry((0, 3), "bfloat16")}
    for spec in shape.parameters():
        entries[spec.name] = TensorEntry(spec.shape, "float32")
        entries[f"optimizer.{spec.name}.exp_avg"] = TensorEntry(spec.shape, "float32")
        entries[f"optimizer.{spec.name}.exp_avg_sq"] = TensorEntry(spec.shape, "bfloat16")
        entries[f"optimizer.{spec.name}.step"] = TensorEntry((), "float32")
        if spec.kind == "linear":
            module = spec.name.removesuffix(".weight")
            for stem, ranks in (
                (f"fp8.{module}.input", ()),
                (f"fp8.{module}.weight", ()),
                (f"fp8_local.{module}.grad_output", (1, 2)),
            ):
                entries[f"{stem}.scale"] = TensorEntry(ranks, "float32")
                entries[f"{stem}.amax_history"] = TensorEntry((*ranks, HISTORY), "float32")
    return entries


def make_source(root: Path, tied: bool) -> Path:
    """A checkpoint of 4 layers as 4 ranks would have saved it at tp2 x pp2."""
    config = small_config(num_layers=4, untie_embeddings_and_output_weights=not tied, **FP8)
    shape = ModelShape.from_config(config, VOCAB)
    record = CheckpointRecord(
        iteration=7,
        config=config.model_dump(mode="json"),
        data_position={"consumed_samples": 56},
        state={"vocab_size": VOCAB, "loss_scaler": {}},
        tensors=entries_of(shape),
    )
    config, layout, _ = target_run(record, TargetLayout(2, 2), root)
    record = dataclasses.replace(
        record, config=config.model_dump(mode="json"), layout=layout_fields(layout)
    )
    holdings = plan_holdings(record.tensors, shape, layout)
    return write_streaming(root, record, holdings, lambda n: value(n, record.tensors[n]))[0]


def copy_of(source: Path, folder: Path) -> Path:
    target = folder / source.name
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
