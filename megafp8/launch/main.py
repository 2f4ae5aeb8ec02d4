"""The entry point: command line and environment in, exit code out.

Exit codes: 0 done, 1 a run that had to stop, 2 a mistake that one line explains, 75 a run that a
signal ended early and whose state, if it had begun, is saved (the same command goes on from there),
130 ended by Ctrl-C, which saves nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megafp8.command.ending import INTERRUPTED, complain, flush_stdout, say, show
from megafp8.config.checks import check_trainable
from megafp8.config.cli import parse_command, wants_help
from megafp8.config.environment import (
    LaunchEnvironment,
    OwnRankError,
    guess_ranks,
    read_world_size,
)
from megafp8.config.megatron_flags import accepted_reason
from megafp8.config.messages import flag_name
from megafp8.config.run_config import RunConfig
from megafp8.config.yaml_reader import UnreadableFileError
from megafp8.errors import (
    CheckpointError,
    DataError,
    LaunchError,
    MeetingError,
    MegaFP8Error,
    PeerError,
    StoppedBySignal,
)
from megafp8.launch.device import decide
from megafp8.launch.dry_run import choose_world_size, describe, preflight
from megafp8.log import TRACKER_THREAD, configure, get_logger
from megafp8.train.signals import Interrupt, StopSignals, ignore_signals

PROGRAM = "pretrain_gpt.py"
STOPPED_BY_SIGNAL = StoppedBySignal.exit_code
GRACE_SECONDS = 5.0

# Switches of ours that are accepted for Megatron's sake and always hold.
ALWAYS_ON = {
    "use_torch_fsdp2": "parameters always go through FSDP2",
    "overlap_grad_reduce": "FSDP2 overlaps what it can; with a pipeline it reduces at the end",
    "overlap_param_gather": "FSDP2 overlaps what it can",
}


def run_program(argv: list[str]) -> NoReturn:
    """Run a command line and end the process with its exit code."""
    interrupt = Interrupt()
    interrupt.install()
    try:
        code = main(argv, interrupt=interrupt)
    except KeyboardInterrupt:  # it came while another error was being told
        code = INTERRUPTED
    ignore_signals()
    flush_stdout()
    hung = any(thread.name.startswith(TRACKER_THREAD) for thread in threading.enumerate())
    if hung or (code and "torch.distributed" in sys.modules):
        # Python's own exit would wait until every pending collective of a process group that was
        # not left in order has timed out, and the other ranks would wait with this one. It would
        # also flush what a tracker has open on a file system that does not answer.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(
    argv: list[str],
    environment: Mapping[str, str] | None = None,
    interrupt: Interrupt | None = None,
) -> int:
    """Run a command line and return the exit code.

    Args:
        argv: Arguments without the program's name.
        environment: What the launcher set; the process's own environment by default.
        interrupt: Tells whether there was a Ctrl-C. It reaches all ranks, and one that is inside a
            collective just then sees the others leave before it sees the signal.
    """
    environment = os.environ if environment is None else environment
    rank, local_rank = guess_ranks(environment)
    try:
        return _dispatch(argv, environment)
    except KeyboardInterrupt as error:
        return _interrupted(str(error), rank)
    except MegaFP8Error as error:
        if interrupt is not None and interrupt.received:
            return _interrupted("", rank)
        if _speaks(error, rank, local_rank):
            complain(str(error), PROGRAM)
        elif "TORCHELASTIC_RUN_ID" in environment:
            # torchrun ends all ranks as soon as one has left: a silent rank that leaves first
            # would take rank 0 with it before it has spoken. And if rank 0 is still there after
            # this time it has no error of its own, so this one has to be told here.
            time.sleep(GRACE_SECONDS)
            complain(f"rank {rank}: {error}", PROGRAM)
        return error.exit_code
    except Exception:  # a bug: shown in full, marked with its rank
        if interrupt is not None and interrupt.received:
            return _interrupted("", rank)
        mark = f"[rank {rank}] "
        text = "".join(mark + line + "\n" for line in traceback.format_exc().splitlines())
        print(text, end="", file=sys.stderr, flush=True)
        return 1


def _dispatch(argv: list[str], environment: Mapping[str, str]) -> int:
    if wants_help(argv):
        from megafp8.config.help import help_text

        show(help_text())
        return 0
    command = parse_command(argv, _saved_run)
    if command.dry_run:
        # An explicit size needs no launcher's, which may be of another job.
        started = None if command.world_size else read_world_size(environment)
        config, choice = decide(command.config, guess_ranks(environment)[1])
        text = describe(config, choose_world_size(command, started), choice)
        if guess_ranks(environment)[0] == 0:
            show(text)
        return 0
    return _train(command.config, LaunchEnvironment.from_mapping(environment))


def _saved_run(load: str) -> tuple[str, Mapping[str, Any]]:
    """Path and configuration of the checkpoint that `--load` means."""
    # Imported here: it needs torch, and few runs need it before they are checked.
    from megafp8.checkpoint import find_checkpoint, read_record
    from megafp8.train.mounts import check_answer

    check_answer({f"--load {load}": [Path(load)]})
    path = find_checkpoint(Path(load))
    if path is None:
        raise CheckpointError(f"--use-checkpoint-args: --load {load} holds no checkpoint")
    return str(path), read_record(path).config


def _train(config: RunConfig, launch: LaunchEnvironment) -> int:
    configure(launch.rank)
    stop = StopSignals()
    speaks = launch.rank == 0 or launch.local_rank == 0
    tell = partial(say, program=PROGRAM) if speaks else lambda text: None
    if threading.current_thread() is threading.main_thread():
        if config.training.exit_signal_handler:
            stop.install()  # before torch, whose import takes seconds
        stop.guard_set_up(tell)
    try:
        code = _train_guarded(config, launch, stop)
    except StoppedBySignal as signal:
        tell(stop.stop_line(signal.number))
        return STOPPED_BY_SIGNAL
    except KeyboardInterrupt as error:
        raise error if error.args else KeyboardInterrupt(f"at {stop.where()}") from None
    except Exception:
        stop.settle()  # what is told now, perhaps after a while, is not cut short
        raise
    stop.settle()
    return code


def _train_guarded(config: RunConfig, launch: LaunchEnvironment, stop: StopSignals) -> int:
    check_trainable(config)
    config, choice = decide(config, launch.local_rank)
    resolved, _, _ = preflight(config, launch.world_size)
    logger = get_logger(__name__)
    if choice is not None:
        logger.info("%s", choice)
    for note in launch.notes:
        logger.info("%s", note)
    for flag, reason in _without_effect(config):
        logger.info("%s has no effect: %s", flag, reason)
    # Imported here: torch takes seconds, and nothing above needs it.
    from megafp8.train.pretrain import run

    return STOPPED_BY_SIGNAL if run(resolved, launch, stop, choice) else 0


def _without_effect(config: RunConfig) -> list[tuple[str, str]]:
    ours = [
        (flag_name(field), reason)
        for field, reason in ALWAYS_ON.items()
        if getattr(config.parallel, field)
    ]
    if config.checkpoint.no_load_rng:
        ours.append(("--no-load-rng", "random streams follow from seed and iteration"))
    return ours + [(flag, accepted_reason(flag)) for flag in config.accepted_flags]


def _speaks(error: MegaFP8Error, rank: int, local_rank: int) -> bool:
    """Whether this rank prints an error: rank 0, or the one whose own fault it is.

    A file, or a name, may be missing on one node only: the first rank of each node speaks of them.
    """
    if isinstance(error, PeerError):
        return error.speaks
    if isinstance(error, MeetingError) and error.speaks:
        return True
    if rank == 0 or isinstance(error, OwnRankError):
        return True
    return local_rank == 0 and isinstance(error, (UnreadableFileError, DataError, LaunchError))


def _interrupted(where: str, rank: int) -> int:
    if rank == 0:
        say(f"interrupted{' ' if where else ''}{where}", PROGRAM)
    return INTERRUPTED
