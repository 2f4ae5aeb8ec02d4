"""Whether a checkpoint is of the run that loads it, and what of that run has changed since.

Tensors of equal shapes do not make an equal model: heads, rotary base, epsilon or activation change
what they compute without changing a shape. Equal paths do not make an equal corpus either. Another
model and a corpus that changed behind its path are refused; other changes are told with their
effect.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megafp8.checkpoint import CheckpointRecord
from megafp8.config import RunConfig
from megafp8.config.meaning import (
    OTHER_IDS,
    OTHER_PRECISION,
    OTHER_ROUNDING,
    OTHER_SAMPLES,
    OTHER_VALIDATION,
    difference,
    model_differences,
    setting_differences,
)
from megafp8.errors import CheckpointError, ConfigurationError
from megafp8.log import get_logger
from megafp8.train.batch_size import BatchSizeSchedule, Position, length_flag, run_end
from megafp8.train.schedule import LearningRateSchedule

log = get_logger(__name__)

LENGTH = ("train_iters", "train_samples")
Fingerprint = Mapping[str, Any]


def check_same_run(
    path: Path,
    record: CheckpointRecord,
    config: RunConfig,
    fingerprint: Fingerprint | None = None,
) -> list[str]:
    """Compare a checkpoint's configuration, corpora and files with those of the run that loads it.

    Args:
        path: The checkpoint.
        record: Its record.
        config: The run that loads it.
        fingerprint: What that run reads, as `take_fingerprint` returns it, and the `backend` of its
            layers; None compares the configurations alone.

    Returns:
        What has changed, a phrase for each effect. It is logged, in one line.

    Raises:
        CheckpointError: The checkpoint is of another model, or a corpus has changed behind its
            path; all differences are named.
    """
    saved = _saved_config(path, record)
    different = list(model_differences(saved, config))
    problems = [f"{path} is of another model: {'; '.join(different)}"] if different else []
    changes: list[str] = []
    # A converted model has no past to compare with.
    if not config.checkpoint.finetune and record.iteration > 0:
        refused, changes = _changes(path, record, saved, config, fingerprint)
        problems += refused
    if problems:
        raise CheckpointError("; ".join(problems))
    if changes:
        log.warning("%s was trained with other settings: %s", path, "; ".join(changes))
    return changes


def _saved_config(path: Path, record: CheckpointRecord) -> RunConfig:
    try:
        return RunConfig.from_dict(record.config)
    except ConfigurationError as error:
        raise CheckpointError(f"{path}: megafp8.json holds an unusable config: {error}") from None


def _changes(
    path: Path,
    record: CheckpointRecord,
    saved: RunConfig,
    config: RunConfig,
    fingerprint: Fingerprint | None,
) -> tuple[list[str], list[str]]:
    """Return what is refused, and what is told."""
    refused: list[str] = []
    told: list[str] = []
    compared: set[str] = set()
    before = record.state.get("fingerprint")
    if before is not None and fingerprint is not None:
        behind = _changed_behind_path(record, saved, config, before, fingerprint)
        if config.checkpoint.allow_changed_corpus:
            told = [f"{text} ({_effect(field)})" for field, text in behind.items()]
        elif behind:
            effects = ", and ".join(sorted(set(map(_effect, behind))))
            advice = (
                "bring the former corpus back, or give --allow-changed-corpus: from sample "
                f"{record.data_position.get('consumed_samples')} on {effects}"
            )
            refused = [*behind.values(), advice]
        told += _told_of_files(saved, config, before, fingerprint)
        compared = _compared(before, fingerprint)
    elif fingerprint is not None and (fingerprint["corpora"] or fingerprint["files"]):
        log.warning(
            "%s holds no fingerprint of what was read (an earlier version saved it): whether "
            "corpus and tokenizer are still the same is not known",
            path,
        )
    if not (_decays_to_the_end(saved) or _decays_to_the_end(config)):
        compared |= set(LENGTH)
    return refused, [*told, *setting_differences(saved, config, compared)]


def _decays_to_the_end(config: RunConfig) -> bool:
    """Whether the length of the run decides its learning rates."""
    optimizer = config.optimizer
    follows = optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction is not None
    return follows and optimizer.lr_decay_iters is None


# ----------------------------------------------------------------------------- what was read


def _compared(before: Fingerprint, now: Fingerprint) -> set[str]:
    """Return the fields of the configuration about which the fingerprints say more."""
    both = {field for kind in ("corpora", "files") for field in before[kind].keys() & now[kind]}
    return both | ({"transformer_impl"} if "backend" in before and "backend" in now else set())


def _differing(kind: str, before: Fingerprint, now: Fingerprint) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, entry then and entry now of what has other contents; the path is none."""
    for field in sorted(before[kind].keys() & now[kind]):
        then, here = before[kind][field], now[kind][field]
        if {**then, "path": ""} != {**here, "path": ""}:
            yield field, then, here


def _changed_behind_path(
    record: CheckpointRecord,
    saved: RunConfig,
    config: RunConfig,
    before: Fingerprint,
    now: Fingerprint,
) -> dict[str, str]:
    """Return a phrase for each corpus whose name is what it was and whose contents are not."""
    return {
        field: f"--{field.replace('_', '-')} {here['path']} is not what it was at iteration "
        f"{record.iteration}: {_size(then)} then, {_size(here)} now"
        for field, then, here in _differing("corpora", before, now)
        if _same_name(field, saved, config, then, here)
    }


def _effect(corpus_field: str) -> str:
    trained = corpus_field in ("data_path", "train_data_path")
    return OTHER_SAMPLES if trained else OTHER_VALIDATION


def _same_name(field: str, saved: RunConfig, config: RunConfig, then: Any, here: Any) -> bool:
    return then["path"] == here["path"] or getattr(saved.data, field) == getattr(config.data, field)


def _size(corpus: Mapping[str, Any]) -> str:
    return (
        f"{corpus['documents']} documents, {corpus['tokens']} tokens (sha256 "
        f"{corpus['sha256'][:8]})"
    )


def _told_of_files(
    saved: RunConfig, config: RunConfig, before: Fingerprint, now: Fingerprint
) -> Iterator[str]:
    """Yield a phrase for each corpus that was exchanged by name, and for each other file."""
    for field, then, here in _differing("corpora", before, now):
        if not _same_name(field, saved, config, then, here):
            values = (f"{one['path']}, {_size(one)}" for one in (then, here))
            yield f"{difference(field, *values)} ({_effect(field)})"
    effects = {"tokenizer_model": OTHER_IDS, "precision_policy": OTHER_PRECISION}
    for field, then, here in _differing("files", before, now):
        values = (_file(one) for one in (then, here))
        yield f"{difference(field, *values)} ({effects.get(field, OTHER_ROUNDING)})"
    if "backend" in before and "backend" in now and before["backend"] != now["backend"]:
        words = difference("transformer_impl", before["backend"], now["backend"])
        yield f"{words} ({OTHER_ROUNDING})"


def _file(file: Mapping[str, Any]) -> str:
    facts = [f"{name} {value}" for name, value in file.items() if name not in ("path", "sha256")]
    return ", ".join([file["path"], f"sha256 {file['sha256'][:8]}", *facts])


# ------------------------------------------------------------------------- where it leads to


def schedule_changes(
    path: Path, record: CheckpointRecord, config: RunConfig, data_parallel_size: int
) -> list[str]:
    """Say where the run and its learning rates go otherwise than the flags suggest.

    Args:
        path: The checkpoint.
        record: Its record, with a data position.
        config: The run that goes on from it.
        data_parallel_size: Ranks that its batch is split over.

    Returns:
        A phrase for each of: an end that has moved though the length's flag has not, a rate that
        jumps here, a warm-up or a decay that ends at another sample, samples that are left over,
        and rates of zero before the end. They are logged, in one line.
    """
    start = Position(record.iteration, int(record.data_position["consumed_samples"]))
    batches = BatchSizeSchedule.from_config(config, data_parallel_size)
    schedule = LearningRateSchedule.from_config(config, batches, start)
    end = run_end(config, batches, start)
    phrases = [
        *_against_former(_saved_config(path, record), config, schedule, start, end),
        *_at_the_end(config, batches, schedule, start, end),
    ]
    if phrases:
        log.warning(
            "going on at iteration %d, sample %d: %s",
            start.iteration,
            start.consumed_samples,
            "; ".join(phrases),
        )
    return phrases


def _against_former(
    saved: RunConfig,
    config: RunConfig,
    schedule: LearningRateSchedule,
    start: Position,
    end: Position,
) -> Iterator[str]:
    try:
        batches = BatchSizeSchedule.from_config(saved, 1)
        former = LearningRateSchedule.from_config(saved, batches, start)
    except ConfigurationError:
        return  # flags that only made sense from where that run started
    was = run_end(saved, batches, start)
    if was != end and all(
        getattr(saved.training, name) == getattr(config.training, name) for name in LENGTH
    ):
        yield (
            f"{length_flag(config)} now ends at iteration {end.iteration} with "
            f"{end.consumed_samples} samples, was iteration {was.iteration} with "
            f"{was.consumed_samples}"
        )
    rates = [f"{one.learning_rate(start.consumed_samples):.6g}" for one in (former, schedule)]
    if end != start and rates[0] != rates[1]:
        yield f"the learning rate jumps from {rates[0]} to {rates[1]}"
    warmups = former.warmup_samples, schedule.warmup_samples
    if warmups[0] != warmups[1] and max(warmups) > start.consumed_samples:
        yield f"its warm-up ends at sample {warmups[1]:g}, was {warmups[0]:g}"
    decays = former.decay_samples, schedule.decay_samples
    constant = {former.decay_style, schedule.decay_style} == {"constant"}
    if not constant and decays[0] != decays[1] and max(decays) > start.consumed_samples:
        yield f"its decay ends at sample {decays[1]}, was {decays[0]}"


def _at_the_end(
    config: RunConfig,
    batches: BatchSizeSchedule,
    schedule: LearningRateSchedule,
    start: Position,
    end: Position,
) -> Iterator[str]:
    samples = config.training.train_samples
    if samples is not None and samples > end.consumed_samples:
        yield (
            f"{samples - end.consumed_samples} of --train-samples {samples} are left over: the "
            f"next batch of {batches.batch_size(end.consumed_samples)} would not fit"
        )
    iterations = end.iteration - start.iteration
    last = batches.consumed_after(max(0, iterations - 1), start.consumed_samples)
    if iterations and last >= schedule.decay_samples and schedule.learning_rate(last) == 0.0:
        # Those that start before the rate is 0; an inverse square root still learns at the end.
        learns = schedule.decay_samples - (schedule.learning_rate(schedule.decay_samples) == 0.0)
        trained = batches.iterations_within(learns, start.consumed_samples)
        trained += start.consumed_samples <= learns
        yield (
            f"the learning rate reaches 0 at sample {schedule.decay_samples} and the run ends at "
            f"sample {end.consumed_samples}: from iteration {start.iteration + trained + 1} on "
            "nothing is learned; give a longer --lr-decay-iters, or --min-lr"
        )
