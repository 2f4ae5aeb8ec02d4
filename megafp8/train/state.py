"""What a checkpoint holds, and how a run is put back to it at any layout."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megafp8.checkpoint import CheckpointRecord, LoadReport, load_with_report, read_record
from megafp8.checkpoint.agree import on_all_ranks
from megafp8.checkpoint.files import iteration_of
from megafp8.checkpoint.find import advice
from megafp8.checkpoint.record import STATE_PREFIX
from megafp8.checkpoint.reshard import layout_fields
from megafp8.checkpoint.scale_state import SCALE_PREFIXES
from megafp8.checkpoint.values import flaw
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.errors import CheckpointError
from megafp8.layers.parameters import gradient_like
from megafp8.log import get_logger
from megafp8.train.continuity import check_same_run, schedule_changes
from megafp8.train.new_tokens import check_rows, start_new_tokens
from megafp8.train.optimizer import optimizer_tensors
from megafp8.train.parts import StatePart, Stored
from megafp8.train.step import TrainingStep

log = get_logger(__name__)


@dataclass
class TrainState(StatePart):
    """Position and counters of a run: the part of its state that says where it is.

    Attributes:
        iteration: completed iterations.
        consumed_samples: the data position.
        skipped_iterations: iterations whose optimizer step was left out.
        nan_iterations: iterations with a non-finite loss.
    """

    name = "data position"

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return position and counters; the iteration has a field of its own in the record."""
        counters = {
            "skipped_iterations": self.skipped_iterations,
            "nan_iterations": self.nan_iterations,
        }
        return {"data_position": {"consumed_samples": self.consumed_samples}, "state": counters}

    def take(self, stored: Stored) -> None:
        """Be where the run that saved was.

        Raises:
            CheckpointError: the checkpoint has no position.
        """
        path, record = stored.path, stored.record
        if "consumed_samples" not in record.data_position:
            raise CheckpointError(f"{path}: megafp8.json holds no {self.name}")
        self.iteration = record.iteration
        self.consumed_samples = int(record.data_position["consumed_samples"])
        self.skipped_iterations = int(record.state.get("skipped_iterations", 0))
        self.nan_iterations = int(record.state.get("nan_iterations", 0))
        log.info(
            "loaded %s: iteration %d, %d samples consumed",
            path,
            self.iteration,
            self.consumed_samples,
        )


def state_tensors(step: TrainingStep, optimizer: bool, loading: bool) -> dict[str, Tensor]:
    """Live tensors under their canonical checkpoint names.

    Args:
        step: owns model and optimizer.
        optimizer: include optimizer state.
        loading: the output layer's copy of a tied embedding has no name of its own. When saving it
            is left out; when loading it reads the embedding's entry where this rank lacks that.
    """
    model, tensors = step.model, {}
    moments = optimizer_tensors(step.optimizer) if optimizer else {}
    for entry in step.gradients.entries:
        name = entry.name
        if model.tied and name == OUTPUT:
            if not loading or EMBEDDING in model.parameters:
                continue
            name = EMBEDDING
        tensors[name] = entry.parameter.data
        parameter, prefix = cast(DTensor, entry.parameter), f"optimizer.{entry.name}."
        for key, value in moments.items():
            if key.startswith(prefix):
                saved = f"optimizer.{name}.{key.removeprefix(prefix)}"
                tensors[saved] = gradient_like(value, parameter) if value.dim() else value
    return tensors


def checkpoint_content(
    state: TrainState,
    step: TrainingStep,
    manifest_sha256: str | None,
    vocab_size: int,
    fingerprint: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], CheckpointRecord]:
    """Return the live tensors and the record of a checkpoint of the run as it is now.

    `fingerprint` is what a later run compares with its own (`check_same_run`).
    """
    tensors = state_tensors(step, not step.config.checkpoint.no_save_optim, loading=False)
    sections: dict[str, dict[str, Any]] = {"data_position": {}, "state": {}}
    for part in (state, *step.parts):
        tensors |= part.tensors()
        for section, entries in part.sections().items():
            sections[section] |= entries
    sections["state"]["vocab_size"] = vocab_size
    if fingerprint is not None:
        sections["state"]["fingerprint"] = dict(fingerprint)
    record = CheckpointRecord(
        iteration=state.iteration,
        config=step.config.model_dump(mode="json"),
        layout=layout_fields(step.mesh.layout),
        data_position=sections["data_position"],
        manifest_sha256=manifest_sha256,
        state=sections["state"],
    )
    return tensors, record


@dataclass(frozen=True)
class Certificate:
    """What a run that goes on from a checkpoint was given by it.

    Attributes:
        path: The checkpoint.
        layout_before, layout_after: Parallel sizes of the run that saved and of this one.
        tensors: loaded, and of these remapped (cut otherwise than saved); defaulted (absent, so
            that their initial value stands); dropped (stored and not used).
        scale_state_sha256: Of all FP8 scale state after loading; None without FP8.
        manifest_sha256: Of the precision manifest that the checkpoint was made under.
        scale_state_rule: What was done to scales that differ between ranks, in words; None where
            none do.
        changes: What of the run has changed since the checkpoint, a phrase for each effect.
    """

    path: Path
    layout_before: dict[str, Any]
    layout_after: dict[str, Any]
    tensors: dict[str, int]
    scale_state_sha256: str | None
    manifest_sha256: str | None
    scale_state_rule: str | None
    changes: tuple[str, ...] = ()


def load_run(
    path: Path,
    state: TrainState,
    step: TrainingStep,
    fingerprint: Mapping[str, Any] | None = None,
) -> Certificate:
    """Put weights, optimizer and the parts of the state back; a collective call at any layout.

    Args:
        path: A complete checkpoint.
        state: The position; with `--finetune` it stays where it is.
        step: Owns model, optimizer and the other parts.
        fingerprint: What the run reads, the same on all ranks; compared with what was read before.

    Raises:
        CheckpointError: on every rank, with names: a weight is missing or unknown, shapes differ,
            a file is damaged, a corpus is another.
    """
    config, finetune = step.config, step.config.checkpoint.finetune
    with_optimizer = not (config.checkpoint.no_load_optim or finetune)
    record = read_record(path)
    named = iteration_of(path.name)
    if named is not None and named != record.iteration:
        log.warning("%s is of iteration %d by its record: that counts", path, record.iteration)
    changes = check_same_run(path, record, config, fingerprint)
    vocab_size = step.model.stages[0].vocab_size
    check_rows(path, record, config, vocab_size)
    tensors = state_tensors(step, with_optimizer, loading=True)
    if with_optimizer and not any(name.startswith("optimizer.") for name in record.tensors):
        raise CheckpointError(
            f"{path} holds no optimizer state (a converted model, or one saved with "
            "--no-save-optim); give --finetune to start from its weights at iteration 0, or "
            f"--no-load-optim to go on at iteration {record.iteration} with moments of zero"
        )
    parts = [part for part in (state, *step.parts) if part.with_weights or not finetune]
    targets = [part.targets(path, record) for part in parts]
    wanted = tensors | {name: value for own in targets for name, value in own.items()}
    report = load_with_report(path, wanted, _optional(with_optimizer))
    _check_values(path, tensors)
    start_new_tokens(path, record, tensors, vocab_size, config.checkpoint.new_tokens_from_mean)
    _copy_tied(step, with_optimizer)
    # The position last: with it all is loaded.
    for part, own in reversed([*zip(parts, targets, strict=True)]):
        part.take(Stored(path, record, own, report.absent))
    certificate = _certify(path, record, step, report)
    if finetune:
        log.info("loaded the weights of %s; training starts at iteration 0 (--finetune)", path)
        return certificate
    changes += schedule_changes(path, record, config, step.mesh.layout.dp)
    if any(reduction.error_feedback for reduction in step.model.fp8_reductions):
        # As large as the unsharded gradients and different on every rank: not worth its bytes.
        log.info(
            "--fp8-grad-error-feedback starts from zero: checkpoints do not hold what the casts of "
            "gradients lost, so the next iterations differ in rounding from an uninterrupted run"
        )
    return replace(certificate, changes=tuple(changes))


def _check_values(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights and optimizer state that training could only spread; a collective call.

    By the rule that the tools go by, each rank for its parts.
    """

    def bad() -> dict[str, str]:
        found = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (what := flaw(name, local)) is not None:
                found[name] = what
        return found

    parts = on_all_ranks(f"loading {path}", bad, None)
    found = {name: what for part in parts for name, what in part.items()}
    if found:
        names = [f"{name} ({what})" for name, what in sorted(found.items())]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        raise CheckpointError(
            f"{path} holds values that no run has, in {len(names)} "
            f"tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:6])}{more}{advice(path)}"
        )


def _certify(
    path: Path,
    record: CheckpointRecord,
    step: TrainingStep,
    report: LoadReport,
) -> Certificate:
    registry = step.model.registry
    state = {} if registry is None else registry.tensors()
    alone = _partners(report.absent)
    parts = on_all_ranks("hashing the scale state", lambda: _digests(state), None)
    # Ranks of one stage hold the same entries: a set keeps each once, and keeps any that differ.
    lines = sorted({f"{name} {value}" for part in parts for name, value in part.items()})
    return Certificate(
        path=path,
        layout_before=record.layout,
        layout_after=layout_fields(step.mesh.layout),
        tensors={
            "loaded": report.loaded - len(alone),
            "remapped": report.remapped,
            "defaulted": len(report.absent) + len(alone),
            "dropped": len(report.dropped),
        },
        scale_state_sha256=hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None,
        manifest_sha256=record.manifest_sha256,
        scale_state_rule=step.scales.rule,
    )


def _partners(absent: Collection[str]) -> set[str]:
    """The scales without their window, and windows without their scale: read, and not used."""
    both = {"scale": "amax_history", "amax_history": "scale"}
    scales = (name.rpartition(".") for name in absent if name.startswith(SCALE_PREFIXES))
    return {f"{head}.{both[tail]}" for head, _, tail in scales} - set(absent)


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def _optional(with_optimizer: bool) -> Callable[[str], bool]:
    """Parts of the state may be absent or unwanted; optimizer state is unwanted if not loaded."""
    prefixes = (*SCALE_PREFIXES, STATE_PREFIX, *(() if with_optimizer else ("optimizer.",)))
    return lambda name: name.startswith(prefixes)


@torch.no_grad()
def _copy_tied(step: TrainingStep, with_optimizer: bool) -> None:
    """Where one rank holds both ends of a tied embedding, the second follows the first."""
    model = step.model
    model.copy_tied_embedding()
    if with_optimizer and model.tied and {EMBEDDING, OUTPUT} <= model.parameters.keys():
        source = optimizer_tensors(step.optimizer, [EMBEDDING])
        for key, target in optimizer_tensors(step.optimizer, [OUTPUT]).items():
            target.copy_(source[key.replace(OUTPUT, EMBEDDING)])
