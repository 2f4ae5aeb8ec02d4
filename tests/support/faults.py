"""Faults planted in one rank of a launched run, as the `patch` of `launches.launched`."""

import os
import signal
import time
from typing import Any


def in_step(rank: int, iteration: int, kind: str) -> None:
    """Fail in the step of an iteration: "raise", "data" (in the loader), "kill", "stop", "hang"."""
    if int(os.environ["RANK"]) != rank:
        return
    from megafp8.data.loader import BatchLoader
    from megafp8.train.step import TrainingStep

    run, batch = TrainingStep.run, BatchLoader.batch

    def fail() -> None:
        if kind == "raise":
            raise ValueError("planted")
        if kind == "data":
            raise OSError(5, "Input/output error")
        if kind == "hang":
            time.sleep(600.0)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def failing_run(self: Any, batches: Any, learning_rate: float, now: int) -> Any:
        if now == iteration and kind != "data":
            fail()
        return run(self, batches, learning_rate, now)

    def failing_batch(self: Any, consumed: int, size: int) -> Any:
        if consumed == (iteration - 1) * size and kind == "data":
            fail()
        return batch(self, consumed, size)

    TrainingStep.run = failing_run  # type: ignore[method-assign]
    BatchLoader.batch = failing_batch  # type: ignore[method-assign]


def without_bf16_units() -> None:
    """Switch the CPU's BF16 units off."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"


def signal_to_self(rank: int, where: str, number: int, times: int = 1) -> None:
    """Receive a signal in "step" 3 or "step 6", in an "evaluation", in a "save", in "data"."""
    if int(os.environ["RANK"]) != rank:
        return
    import megafp8.train.loop as loop
    import megafp8.train.pretrain as run
    from megafp8.checkpoint.writer import ShardFile
    from megafp8.train.step import TrainingStep

    sent = []

    def send() -> None:
        if not sent:
            sent.append(where)
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(0.05)

    def before(owner: Any, name: str, when: Any = lambda arguments: True) -> None:
        function = getattr(owner, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if when(arguments):
                send()
            return function(*arguments, **keywords)

        setattr(owner, name, wrapped)

    if where in ("step", "step 6"):
        at = 3 if where == "step" else 6
        before(TrainingStep, "run", lambda arguments: arguments[3] == at)
    elif where == "evaluation":
        before(loop, "validation_loss")
    elif where == "save":
        before(ShardFile, "append")
    else:
        assert where == "data", where
        before(run, "build_datasets")


def slow_data(rank: int, seconds: float) -> None:
    """Make one rank late for the rendezvous, as one that builds an index is."""
    if int(os.environ["RANK"]) != rank:
        return
    import megafp8.train.pretrain as run

    build = run.build_datasets

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return build(*arguments)

    run.build_datasets = slow


def slow_model(seconds: float) -> None:
    """Make building the model take as long as that of a large one."""
    import megafp8.train.pretrain as run

    build = run._build

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return build(*arguments)

    run._build = slow


def absent(rank: int) -> None:
    """Let one rank never come to the rendezvous, as if it had not been started."""
    if int(os.environ["RANK"]) == rank:
        time.sleep(600.0)


def no_data(rank: int) -> None:
    """Let one rank find no data."""
    if int(os.environ["RANK"]) != rank:
        return
    import megafp8.train.pretrain as run
    from megafp8.errors import DataError

    def fail(*arguments: Any) -> Any:
        raise DataError("p.idx: no such file")

    run.build_datasets = fail


def stuck(rank: int, where: str) -> None:
    """Let one rank stay for good where the others wait for it: "data", "world", "groups", ...

    It prints "stuck" as it gets there.
    """
    if int(os.environ["RANK"]) != rank:
        return
    import torch.distributed as dist

    import megafp8.train.folders as folders
    import megafp8.train.loop as loop
    import megafp8.train.pretrain as run

    places: dict[str, tuple[Any, str]] = {
        "data": (run, "build_datasets"),
        "world": (dist, "init_process_group"),
        "groups": (run, "build_mesh"),
        "folders": (folders, "_probe"),  # inside `on_first_rank`
        "model": (run, "_build"),
        "loop": (loop.Loop, "_iterate"),
    }

    def stay(*arguments: Any, **keywords: Any) -> None:
        print("stuck", flush=True)
        time.sleep(600.0)

    setattr(*places[where], stay)


def no_data_beside_a_wait(rank: int, waits: int) -> None:
    """Let one rank find no data while another one is still opening its own, for good."""
    no_data(rank)
    stuck(waits, "data")


def dead_service(port: int) -> None:
    """Plant a `wandb` whose online start waits for a service that takes the connection and no more.

    As behind a proxy that is dead. What it is given offline it prints.
    """
    import socket
    import sys
    from types import SimpleNamespace

    def init(**arguments: Any) -> Any:
        if arguments.get("mode") != "offline":
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.recv(1)
        return SimpleNamespace(
            log=lambda values, step: print(f"offline point {step}", flush=True),
            finish=lambda: print("offline end", flush=True),
        )

    sys.modules["wandb"] = SimpleNamespace(init=init)  # type: ignore[assignment]
    import megafp8.train.trackers as trackers

    trackers.START_SECONDS = 1.0


def slow_steps(seconds: float) -> None:
    """Make every step longer, so that a run is still there when a test looks."""
    from megafp8.train.step import TrainingStep

    run = TrainingStep.run

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return run(*arguments)

    TrainingStep.run = slow  # type: ignore[method-assign]


def read_only_after(saves: int) -> None:
    """Let no folder be made for a checkpoint after some, as where a file system turns read-only."""
    import errno

    import megafp8.checkpoint.save as save

    make, made = save.make_temporary, []

    def refuse(*arguments: Any) -> Any:
        if len(made) >= saves:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        made.append(make(*arguments))
        return made[-1]

    save.make_temporary = refuse
