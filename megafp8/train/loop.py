"""The loop over iterations: batch, step, report, evaluate, save."""

import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.command.ending import signal_name
from megafp8.config import ModelShape, RunConfig
from megafp8.data.loader import BatchLoader, Datasets
from megafp8.errors import TrainingError
from megafp8.evaluation import validation_loss
from megafp8.log import get_logger
from megafp8.model.batch import to_tensors
from megafp8.model.flops import peak_tflops, training_flops_per_token
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.traffic import summarize
from megafp8.parallel.watch import Watch
from megafp8.precision import AuditLog
from megafp8.train.batch_size import BatchSizeSchedule
from megafp8.train.folders import device_name
from megafp8.train.measure import memory_peak_bytes, parameter_norm
from megafp8.train.metrics import IterationMetrics, MetricsWriter
from megafp8.train.saving import RunSaver
from megafp8.train.schedule import LearningRateSchedule
from megafp8.train.signals import StopSignals
from megafp8.train.state import TrainState
from megafp8.train.step import TrainingStep

log = get_logger(__name__)


@dataclass
class Loop:
    """Trains from `state.iteration` to `total_iterations`.

    Attributes:
        config, shape, mesh: the run.
        datasets: splits.
        step: does one iteration.
        state: position and counters.
        batches, schedule: global batch size and learning rate by position.
        total_iterations: where the run ends.
        signals: notes those to this rank.
        watch: is told where this rank is.
        audit: where skipped steps and an early stop are noted.
        started: when the program did, by `time.monotonic()`.
        train_loader: gives the training split.
    """

    config: RunConfig
    shape: ModelShape
    mesh: Mesh
    datasets: Datasets
    step: TrainingStep
    state: TrainState
    batches: BatchSizeSchedule
    schedule: LearningRateSchedule
    total_iterations: int
    signals: StopSignals
    watch: Watch
    audit: AuditLog
    started: float
    train_loader: BatchLoader = field(init=False)

    def __post_init__(self) -> None:
        data, training, layout = self.config.data, self.config.training, self.mesh.layout
        self._signal = 0  # what the ranks agreed to stop for
        self.train_loader = BatchLoader(
            self.datasets.train,
            self.shape.seq_length,
            training.micro_batch_size,
            self.mesh.dp_rank,
            layout.dp,
            num_workers=data.num_workers,
        )
        self._valid_loader = None
        if self.datasets.valid is not None and training.eval_interval and training.eval_iters:
            self._valid_loader = BatchLoader(
                self.datasets.valid,
                self.shape.seq_length,
                training.micro_batch_size,
                self.mesh.dp_rank,
                layout.dp,
            )
        self._flops_per_token = training_flops_per_token(self.shape)
        precision = "fp8" if self.config.precision.fp8 else self.config.precision.compute_dtype
        self._peak_tflops = peak_tflops(device_name(self.mesh.world.device), precision)

    def run(self, writer: MetricsWriter, saver: RunSaver) -> int:
        """Train to the end, or to the exit interval, duration or signal; the last state is saved.

        Args:
            writer: reports iterations on rank 0; closed here.
            saver: writes the checkpoints.

        Returns:
            The signal that ended the run early, the same on all ranks; 0 if none did, also where
            one came in the last iteration.
        """
        settled = False
        try:
            reason = self._iterate(writer, saver)
            if reason:
                log.info("stopping at iteration %d (%s)", self.state.iteration, reason)
                self._note_stop(reason, saver.newest)
            self.watch.place = f"the save after iteration {self.state.iteration}"
            saver.finish()
            settled = True
        except KeyboardInterrupt:
            settled = True
            saver.abandon()
            self._note_stop(signal_name(signal.SIGINT), saver.newest)
            raise KeyboardInterrupt(self._lost(saver.newest)) from None
        finally:
            if not settled:
                saver.abandon()
            self.train_loader.close()
            writer.close()
        return self._signal

    def _iterate(self, writer: MetricsWriter, saver: RunSaver) -> str:
        """Train until there is nothing to train, or something ends it early: what, in a word."""
        # One that came as the set-up ended; nothing is trained or saved for it.
        self.signals.defer()
        self._signal = self._agree_on_signal()
        self.signals.settle()
        self.watch.setting_up = False
        self.mesh.traffic.drain()  # of setting up and loading: no iteration's
        while self.state.iteration < self.total_iterations and not self._signal:
            writer.write(self.one_iteration())
            try:
                self.step.check_not_stuck(self.state.iteration)
            except TrainingError as error:
                self._note_stop(str(error), saver.newest, level="error")
                raise
            saver.poll()
            if self._due(self.config.checkpoint.save_interval) and not self._signal:
                self.watch.place = f"the save after iteration {self.state.iteration}"
                saver.save()
            limit = self._limit_reached()
            if limit:
                return limit
        if self._signal and self.state.iteration >= self.total_iterations:
            log.info("%s came when all was done", signal_name(self._signal))
            self._signal = 0
        return signal_name(self._signal) if self._signal else ""

    def _limit_reached(self) -> str:
        """The flag that ends the run here, before its end; empty if none does."""
        if self._signal or self.state.iteration >= self.total_iterations:
            return ""
        if self._due(self.config.training.exit_interval):
            return "--exit-interval"
        return "--exit-duration-in-mins" if self._time_is_up() else ""

    def _lost(self, newest: Path | None) -> str:
        """What an interrupted run leaves behind, in words."""
        return (
            f"at {self.watch.place}, not saved: the last checkpoint is "
            f"{newest or 'none'} (SIGTERM or SIGUSR1 instead of Ctrl-C save first)"
        )

    def _note_stop(self, reason: str, newest: Path | None, level: str = "info") -> None:
        self.audit.write(
            "stop",
            self.state.iteration,
            level=level,
            action="exit",
            data_position={"consumed_samples": self.state.consumed_samples},
            checkpoint_before=None if newest is None else str(newest),
            reason=reason,
        )

    def _note_skip(self, reason: str) -> None:
        self.audit.write(
            "skip",
            self.state.iteration,
            level="warning",
            action="continue",
            data_position={"consumed_samples": self.state.consumed_samples},
            reason=reason,
        )

    def _agree_on_signal(self) -> int:
        """The largest signal number that any rank has received; a collective call."""
        mine = torch.tensor([self.signals.received], device=self.mesh.world.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return int(mine)

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.state.iteration % (interval or 1) == 0

    def _time_is_up(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        if limit is None:
            return False
        # Clocks differ between ranks: the first to be late decides for all.
        late = torch.tensor(
            [time.monotonic() - self.started >= limit * 60],
            dtype=torch.int32,
            device=self.mesh.world.device,
        )
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late)

    def micro_batches(self) -> list[dict[str, Tensor]]:
        """Return this rank's part of the next global batch."""
        state = self.state
        size = self.batches.batch_size(state.consumed_samples)
        batches = self.train_loader.batch(state.consumed_samples, size)
        return to_tensors(batches, self.mesh, self.config.training.seed, state.iteration)

    def one_iteration(self) -> IterationMetrics:
        """Train on the next global batch, and evaluate if that is due; a collective call."""
        state = self.state
        self.watch.place = f"iteration {state.iteration + 1}"
        began = time.perf_counter()
        batch_size = self.batches.batch_size(state.consumed_samples)
        learning_rate = self.schedule.learning_rate(state.consumed_samples)
        loss_scale = self.step.loss_scaler.scale
        result = self.step.run(self.micro_batches(), learning_rate, state.iteration + 1)
        state.iteration += 1
        state.consumed_samples += batch_size
        state.skipped_iterations += result.skipped
        state.nan_iterations += not math.isfinite(result.loss)
        if result.skipped:
            self._note_skip(result.reason)
        params_norm = parameter_norm(self.step) if self.config.logging.log_params_norm else None
        comm_bytes, comm_calls, memory = self._over_ranks()
        seconds = time.perf_counter() - began  # the gather above waited for the optimizer too
        ends = state.iteration == self.total_iterations
        evaluates = ends or self._due(self.config.training.eval_interval)
        evaluates = evaluates and not self.step.stuck
        valid_loss = self._evaluate(last=ends) if evaluates else None
        tokens = batch_size * self.shape.seq_length
        rate = tokens / seconds
        tflops = rate * self._flops_per_token / self.mesh.world.size / 1e12
        return IterationMetrics(
            iteration=state.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=learning_rate,
            tokens=tokens,
            consumed_samples=state.consumed_samples,
            step_time_s=seconds,
            tokens_per_s=rate,
            tflops_per_device=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
            mem_peak_bytes=memory,
            skipped=result.skipped,
            comm_bytes=comm_bytes,
            comm_calls=comm_calls,
            valid_loss=valid_loss,
            global_batch_size=batch_size,
            loss_scale=loss_scale,
            params_norm=params_norm,
            num_zeros_in_grad=result.zeros_in_grad,
            extra_losses=result.extra_losses,
        )

    def _over_ranks(self) -> tuple[dict[str, dict[str, int]], dict[str, int], int]:
        """Traffic and peak memory of all ranks, by one gather that is itself not counted.

        Signals travel with it: all ranks learn of one at the same iteration, at no cost.
        """
        device = self.mesh.world.device
        drained = self.mesh.traffic.drain()
        counters = [*drained, memory_peak_bytes(device), self.signals.received]
        mine = torch.tensor(counters, dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.mesh.world.size)]
        dist.all_gather(everyone, mine)
        table = torch.stack(everyone).cpu()
        self._signal = int(table[:, -1].max())
        return *summarize(table[:, :-2]), int(table[:, -2].max())

    def _evaluate(self, last: bool) -> float | None:
        """The validation loss; None if nothing is evaluated, or a signal ended it early.

        An evaluation may be as long as many steps, and a notice before a time limit shorter. Only
        the one of the last iteration is finished: no later start of the run would repeat it.
        """
        if self._valid_loader is None or (self._signal and not last):
            return None
        training = self.config.training
        self.watch.place = f"the evaluation after iteration {self.state.iteration}"
        loss = validation_loss(
            self.step.model,
            self._valid_loader,
            self.mesh,
            training.eval_iters,
            self.batches.global_batch_size,
            stop=None if last else self._asked_to_stop,
        )
        self.mesh.traffic.drain()  # an iteration's bytes are those of training
        if loss is None:
            log.info("iteration %d: the evaluation is left out", self.state.iteration)
        else:
            log.info("iteration %d: validation loss %.4f", self.state.iteration, loss)
        return loss

    def _asked_to_stop(self) -> bool:
        self._signal = self._agree_on_signal()
        return bool(self._signal)
