"""What tests of conversions share: logits at any layout (functions for ranks), and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint import find_checkpoint, load_tensors, read_record
from megafp8.checkpoint.whole_model import single_process_config
from megafp8.config import RunConfig
from megafp8.convert.run import ConvertOptions, convert
from megafp8.errors import CheckpointError
from tests.model.small import start_run

LENGTH, VOCAB = 64, 100


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def run_convert(source: str, target: str, load: Path, save: Path, **more: Any) -> list[str]:
    """Convert with the small context that `logits` needs."""
    if source != "megafp8" and more.get("config") is None:
        more = {"seq_length": LENGTH, **more}
    return convert(ConvertOptions(source, target, Path(load), Path(save), **more))


@torch.no_grad()
def logits(folder: str, tp: int, pp: int) -> Tensor | None:
    """fp32 [b, s, vocab] on the last stage's first rank, None elsewhere."""
    checkpoint = find_checkpoint(Path(folder))
    assert checkpoint is not None
    record = read_record(checkpoint)
    config = single_process_config(record.config)
    parallel = config.parallel.model_copy(
        update={"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    )
    training = config.training.model_copy(
        update={"micro_batch_size": 2, "global_batch_size": 2 * pp}
    )
    precision = config.precision.model_copy(update={"bf16": False, "fp16": False})
    changed = {"parallel": parallel, "training": training, "precision": precision}
    run = start_run(RunConfig.from_dict(config.model_copy(update=changed).model_dump()), VOCAB)
    model = run.model
    wanted = {name: p.data for name, p in model.parameters.items() if name in model.specs}
    if model.tied and "output_layer.weight" in model.parameters and pp > 1:
        # As a run does: the last stage's copy reads the embedding's entry.
        copy = model.parameters["output_layer.weight"].data
        wanted |= {"embedding.word_embeddings.weight": copy}
    load_tensors(checkpoint, wanted, lambda name: name.startswith(("fp8.", "optimizer.")))
    model.copy_tied_embedding()
    model.set_training(False)
    (stage,) = model.stages
    x, rank = tokens(), dist.get_rank()
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    if not stage.is_first:
        x = torch.empty(LENGTH, 2, config.model.hidden_size)
        dist.recv(x, rank - tp)
    y = stage(x, positions, torch.zeros(1, dtype=torch.int64))
    if not stage.is_last:
        dist.send(y.contiguous(), rank + tp)
        return None
    full = stage.full_logits(y).transpose(0, 1).contiguous()
    return full if run.mesh.tp.rank == 0 else None


def all_logits(folders: dict[str, str], tp: int, pp: int) -> dict[str, Tensor | None]:
    """`logits` of several checkpoints, one after another."""
    return {name: logits(folder, tp, pp) for name, folder in folders.items()}


def refused(folder: Path, match: str, target: str = "megafp8", **options: Any) -> None:
    """Converting raises one line, and leaves nothing beside the source."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(CheckpointError, match=match) as caught:
        run_convert("hf", target, folder, folder.parent / "out", **options)
    assert "\n" not in str(caught.value)
    assert sorted(folder.parent.iterdir()) == before
