"""One training run, from a checked configuration to the last checkpoint."""

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megafp8.checkpoint.agree import on_first_rank
from megafp8.config import LaunchEnvironment, ModelShape, RunConfig
from megafp8.config.auto_precision import PrecisionChoice
from megafp8.data.fingerprint import take_fingerprint
from megafp8.data.loader import Datasets, build_datasets
from megafp8.data.tokenizers import build_tokenizer, resolve_vocab_size
from megafp8.errors import DataError, PrecisionError
from megafp8.layers.choice import choose_backend, close_backend
from megafp8.log import get_logger
from megafp8.model import Model, build_model
from megafp8.numerics import Recipe, missing_product, recipe_hardware, writes_fp32
from megafp8.parallel import Mesh, build_mesh, start, stop
from megafp8.parallel.startup import watch_over
from megafp8.parallel.watch import Watch
from megafp8.precision import AuditLog, PrecisionPlan, build_plan, recipe_from_config
from megafp8.train.batch_size import (
    BatchSizeSchedule,
    Position,
    length_flag,
    total_iterations,
)
from megafp8.train.folders import (
    HeldFolders,
    device_name,
    hold_folders,
    open_save_dir,
    write_records,
)
from megafp8.train.loop import Loop
from megafp8.train.loss_scaler import build_loss_scaler
from megafp8.train.metrics import MetricsWriter, Observer
from megafp8.train.mounts import check_files_answer
from megafp8.train.optimizer import check_optimizer
from megafp8.train.progress import ProgressBar
from megafp8.train.saving import RunSaver
from megafp8.train.schedule import LearningRateSchedule
from megafp8.train.signals import StopSignals
from megafp8.train.state import Certificate, TrainState, load_run
from megafp8.train.step import TrainingStep
from megafp8.train.trackers import FINISH_SECONDS, build_trackers

log = get_logger(__name__)


def run(
    config: RunConfig,
    launch: LaunchEnvironment,
    signals: StopSignals | None = None,
    choice: PrecisionChoice | None = None,
) -> int:
    """Train as configured; every rank calls it.

    Args:
        config: resolved and checked (`launch.preflight`).
        launch: this process among all.
        signals: notes those to this process; None if nothing does.
        choice: what `auto` came to on this rank's device, if it was asked for.

    Returns:
        The number of the signal that ended the run early, the same on all ranks; 0 if none did.

    Raises:
        MegaFP8Error: what the user can mend, on all ranks. Data are opened before the process group
            is joined, and a rank that fails there leaves word for those that wait for it.
    """
    signals = signals or StopSignals()
    # Before data and process group: a package that is not there must not cost a start.
    choose_backend(config)
    check_optimizer(config.optimizer)
    parallel = config.parallel
    with watch_over(launch.rank, launch.world_size, lambda: signals.pending) as watch:
        signals.where = lambda: watch.place
        signals.fault = lambda: watch.fault
        watch.place = "the opening of the data"
        vocab_size, datasets = _open_data(config)
        world = start(
            launch.rank,
            launch.world_size,
            launch.local_rank,
            parallel.distributed_backend,
            parallel.distributed_timeout_minutes,
            config.training.deterministic_mode,
            watch,
        )
        watch.place = "set-up"
        if choice is not None:
            check_same_choice(choice)
        mesh = build_mesh(config.layout(world.size), world)
        shape = ModelShape.from_config(config, vocab_size)
        with hold_folders(config) as folders:
            ended_by = _train(
                config, shape, mesh, datasets, signals, watch, choice, launch.started, folders
            )
        stop()
    return ended_by


def _open_data(config: RunConfig) -> tuple[int, Datasets]:
    """Vocabulary size and splits."""
    check_files_answer(config)
    tokenizer = build_tokenizer(config.data)
    for note in () if tokenizer is None else tokenizer.notes:
        log.warning("%s", note)
    vocab_size = resolve_vocab_size(config.data, tokenizer)
    datasets = build_datasets(config, tokenizer)
    training = config.training
    if training.eval_interval and training.eval_iters and not datasets.valid:
        raise DataError(
            f"--eval-interval {training.eval_interval}: the validation split holds no sample of "
            f"seq-length + 1 = {config.model.seq_length + 1} tokens; give more to it in --split, "
            "--valid-data-path, or no --eval-interval"
        )
    return vocab_size, datasets


def _train(
    config: RunConfig,
    shape: ModelShape,
    mesh: Mesh,
    datasets: Datasets,
    signals: StopSignals,
    watch: Watch,
    choice: PrecisionChoice | None,
    started: float,
    folders: HeldFolders,
) -> int:
    """Train in folders that are this job's alone."""
    run_dir, source = folders.run_dir, folders.source
    plan = build_plan(config, shape, mesh.layout)
    model = _build(config, shape, plan, mesh)
    step = TrainingStep(config, model, mesh, build_loss_scaler(config.precision))
    fingerprint = _fingerprint(config, datasets, model)
    state, certificate = TrainState(), None
    if source is not None:
        certificate = load_run(source, state, step, fingerprint)
    folders.release_source()
    save_dir = open_save_dir(config, run_dir, fresh=state.iteration == 0)
    backend = model.backend.record()
    manifest = write_records(config, plan, run_dir, mesh.world.device, backend, choice)
    batches = BatchSizeSchedule.from_config(config, mesh.layout.dp)
    start = Position(state.iteration, state.consumed_samples)
    total = total_iterations(config, batches, start)
    _announce(config, shape, mesh, plan, model, batches, run_dir)
    if state.iteration >= total:
        log.warning("%s: %s leaves nothing to train", start, length_flag(config))
    with closing(AuditLog(run_dir, enabled=mesh.world.rank == 0)) as audit:
        if certificate is not None:
            _note_resume(audit, state, certificate, manifest)
        saver = RunSaver(
            step,
            state,
            audit,
            folder=save_dir,
            ours=folders.check_ours,
            newest=source,
            manifest_sha256=manifest,
            vocab_size=shape.vocab_size,
            fingerprint=fingerprint,
        )
        signal = Loop(
            config=config,
            shape=shape,
            mesh=mesh,
            datasets=datasets,
            step=step,
            state=state,
            batches=batches,
            schedule=LearningRateSchedule.from_config(config, batches, start),
            total_iterations=total,
            signals=signals,
            watch=watch,
            audit=audit,
            started=started,
        ).run(_open_writer(config, run_dir, mesh, total, state.iteration), saver)
    close_backend(model.backend)
    if signal:
        log.info("stopped: iteration %d of %d, run folder %s", state.iteration, total, run_dir)
        log.info("%s", _how_to_go_on(config, run_dir, save_dir, saver.newest))
    else:
        log.info("done: iteration %d, run folder %s", state.iteration, run_dir)
    return signal


def _build(config: RunConfig, shape: ModelShape, plan: PrecisionPlan, mesh: Mesh) -> Model:
    """The model, on a device that is known to compute by its recipe."""
    _seed_default_generators(config.training.seed)
    recipe = recipe_from_config(config)
    if recipe is not None:
        _check_fp8_device(config, recipe, mesh)
    model = build_model(config, shape, plan, recipe, mesh)
    if recipe is not None and model.backend.chosen == "native":
        _check_fp8_kernels(plan, recipe, mesh.world.device)
    return model


def _fingerprint(config: RunConfig, datasets: Datasets, model: Model) -> dict[str, Any]:
    """What the numbers of a run follow from beside its settings; a collective call.

    One rank reads: nodes may have copies of the data, and all ranks have to find the same.
    """
    read = on_first_rank("hashing the corpus", lambda: take_fingerprint(config, datasets), None)
    return {**read, "backend": model.backend.chosen}


def _how_to_go_on(config: RunConfig, run_dir: Path, save_dir: Path, newest: Path | None) -> str:
    """What to type after a run that was ended early."""
    load, changes = config.checkpoint.load, []
    if newest is not None:
        if load is None or Path(load).absolute() != save_dir.absolute():
            changes.append(f"with --load {save_dir}")
        if config.checkpoint.finetune:
            changes.append("without --finetune")
    if config.logging.run_dir is None:
        changes.append(f"with --run-dir {run_dir}")
    return "to go on: the same command" + (f" {', '.join(changes)}" if changes else "")


def _open_writer(
    config: RunConfig, run_dir: Path, mesh: Mesh, total: int, iteration: int
) -> MetricsWriter:
    rank0 = mesh.world.rank == 0
    observers: list[Observer] = []
    if rank0:
        observers = [
            *build_trackers(
                config.logging,
                run_dir,
                resumed_iteration=iteration,
                settings=config.to_dict(),
                # The other ranks wait in a collective meanwhile.
                finish_seconds=min(
                    FINISH_SECONDS, 20.0 * config.parallel.distributed_timeout_minutes
                ),
            ),
            ProgressBar(total, completed=iteration),
        ]
    return MetricsWriter(
        run_dir,
        enabled=rank0,
        total_iterations=total,
        log_interval=config.logging.log_interval,
        resumed_iteration=iteration,
        log_throughput=config.logging.log_throughput,
        observers=observers,
    )


def _note_resume(
    audit: AuditLog, state: TrainState, certificate: Certificate, manifest: str
) -> None:
    """The certificate of what a checkpoint gave to this run."""
    audit.write(
        "resume",
        state.iteration,
        action="finetune" if state.iteration == 0 else "continue",
        data_position={"consumed_samples": state.consumed_samples},
        checkpoint_before=str(certificate.path),
        more={
            "layout_before": certificate.layout_before,
            "layout_after": certificate.layout_after,
            "tensors": certificate.tensors,
            "scale_state_sha256": certificate.scale_state_sha256,
            "scale_state_rule": certificate.scale_state_rule,
            "manifest_sha256_before": certificate.manifest_sha256,
            "manifest_sha256_after": manifest,
            "changes": list(certificate.changes),
        },
    )


def _seed_default_generators(seed: int) -> None:
    """Nothing here draws from them; a library that does shall at least repeat itself."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def check_same_choice(choice: PrecisionChoice) -> None:
    """Refuse `auto` that came to different things on different ranks; a collective call.

    Raises:
        PrecisionError: on all ranks, naming the first that differs from rank 0.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, choice)
    for other, theirs in enumerate(found):
        if theirs.taken != found[0].taken:
            raise PrecisionError(
                f"{' and '.join(choice.asked)} came to {found[0].taken} on rank 0 "
                f"({found[0].hardware}) and to {theirs.taken} on rank {other} "
                f"({theirs.hardware}); give the precision by name"
            )


def _check_fp8_device(config: RunConfig, recipe: Recipe, mesh: Mesh) -> None:
    """A GPU without units for the recipe emulates only if asked by name; a CPU always emulates."""
    device, precision = mesh.world.device, config.precision
    if precision.fp8_emulate or recipe.fake_quant:
        return
    native, reason = recipe_hardware(recipe, device)
    if device.type == "cuda" and not native:
        raise PrecisionError(
            f"--fp8-format {precision.fp8_format} --fp8-recipe {recipe.name}: {reason}; give "
            "--fp8-emulate to compute with FP8 values in BF16 GEMMs, or leave --fp8-format out"
        )


def _check_fp8_kernels(plan: PrecisionPlan, recipe: Recipe, device: torch.device) -> None:
    """Hear before the first step what a GPU has no kernel for; all ranks have the same sizes."""
    if device.type == "cuda" and not recipe.fake_quant and recipe_hardware(recipe, device)[0]:
        _try_products(plan, recipe, device)


def _try_products(plan: PrecisionPlan, recipe: Recipe, device: torch.device) -> None:
    """Multiply zeros of each size that an FP8 linear of the plan has."""
    dtype = torch.float32 if writes_fp32(recipe, device) else torch.bfloat16
    linears = [linear for linear in plan.linears if linear.precision == "fp8"]
    sizes = {(p.tokens, p.in_features, p.out_features): p for p in reversed(linears)}
    for size, linear in sizes.items():
        missing = missing_product(recipe, device, size, dtype)
        if missing is not None:
            tokens, inner, outer = size
            raise PrecisionError(
                f"--fp8-recipe {recipe.name}: {linear.name} [{tokens} x {inner}] @ [{inner} x "
                f"{outer}] has no kernel on this GPU ({missing}); keep it out with "
                "--precision-policy, or take --fp8-recipe tensorwise or delayed"
            )


def _announce(
    config: RunConfig,
    shape: ModelShape,
    mesh: Mesh,
    plan: PrecisionPlan,
    model: Model,
    batches: BatchSizeSchedule,
    run_dir: Path,
) -> None:
    """What was built, in five lines."""
    layout = mesh.layout
    parameters = sum(spec.numel for spec in shape.parameters())
    log.info(
        "model: %d layers built over %d stages, %d parameters, vocabulary %d (padded to %d)",
        layout.layers_per_stage * layout.num_stages,
        layout.num_stages,
        parameters,
        shape.vocab_size,
        shape.padded_vocab_size,
    )
    log.info(
        "layout: world %d = %s, schedule %s, sequence parallel %s",
        layout.world_size,
        " x ".join(f"{axis} {layout.size(axis)}" for axis in layout.grid),
        layout.schedule,
        "on" if layout.sequence_parallel else "off",
    )
    tokens = batches.global_batch_size * shape.seq_length
    log.info(
        "batch: %d samples x %d tokens = %d tokens per iteration",
        batches.global_batch_size,
        shape.seq_length,
        tokens,
    )
    log.info("backend: %s (%s)", model.backend.chosen, model.backend.reason)
    kernels = model.backend.details.get("fp8_kernels")
    if kernels is not None:
        log.info("FP8 kernels: %s (%s)", kernels["chosen"], kernels["reason"])
    products = model.backend.details.get("bf16_products")
    if products is not None:
        log.info("BF16 is multiplied in %s: %s", products["chosen"].upper(), products["reason"])
    log.info(
        "precision: %s, %d of %d linears in FP8; device %s; run folder %s",
        config.precision.compute_dtype,
        plan.count("fp8"),
        len(plan.linears),
        device_name(mesh.world.device),
        run_dir,
    )
