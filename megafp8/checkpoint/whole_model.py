"""A checkpoint of any layout as a whole model in one process."""

from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.find import read_record
from megafp8.checkpoint.load import load_tensors
from megafp8.checkpoint.record import STATE_PREFIX
from megafp8.checkpoint.scale_state import SCALE_PREFIXES
from megafp8.config import ModelShape, RunConfig
from megafp8.model import Model, build_model
from megafp8.parallel import Mesh, World, build_mesh
from megafp8.precision import build_plan

# Sections that a single process takes from the checkpoint unchanged; the rest is made for one rank.
KEPT_SECTIONS = ("model", "data", "optimizer", "training")


def single_process_config(saved: dict[str, Any]) -> RunConfig:
    """The run of a checkpoint as one process, in its compute dtype, without FP8 or dropout.

    Args:
        saved: `config` of the checkpoint's record.
    """
    values = {name: dict(saved[name]) for name in KEPT_SECTIONS}
    values["precision"] = {name: saved["precision"][name] for name in ("bf16", "fp16")}
    values["model"] |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if values["model"]["transformer_impl"] == "transformer_engine":
        # Checkpoints do not depend on the backend, and a sample may be drawn where it is not.
        values["model"] |= {"transformer_impl": "auto", "attention_backend": "auto"}
    values["training"] |= {
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "rampup_batch_size": None,
        "recompute_granularity": None,
        "recompute_num_layers": None,
    }
    return RunConfig.from_dict(values)


def load_model(checkpoint: Path, world: World) -> tuple[Model, RunConfig, ModelShape, Mesh]:
    """Build the model of a checkpoint in this one process and load its weights.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or not of its own configuration.
    """
    record = read_record(checkpoint)
    config = single_process_config(record.config)
    mesh = build_mesh(config.layout(1), world)
    shape = ModelShape.from_config(config, int(record.state["vocab_size"]))
    plan = build_plan(config, shape, mesh.layout)
    model = build_model(config, shape, plan, None, mesh)
    tensors: dict[str, Tensor] = {
        name: parameter.data for name, parameter in model.parameters.items() if name in model.specs
    }
    unused = (*SCALE_PREFIXES, STATE_PREFIX, "optimizer.")
    load_tensors(checkpoint, tensors, lambda name: name.startswith(unused))
    model.copy_tied_embedding()
    model.set_training(False)
    return model, config, shape, mesh
