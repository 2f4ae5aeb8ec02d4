"""Speed of checkpoints against the disk's own, ratios from one run.

    OMP_NUM_THREADS=1 python bench/checkpoint.py [--gigabytes 1] [--rounds 5] [--folder DIR]

Four gloo ranks hold a gigabyte of state between them, in tensors of 8 MiB sharded over the ranks.
In each round, in turn and on the same ranks:

    raw write    each rank writes its share into one file and syncs it
    save         `save_checkpoint`: shards, checksums, index, record, every file and folder synced
    async        how long `Saver(background=True)` keeps the caller (copying to host memory), and
                 how long until the checkpoint is complete
    raw read     each rank reads its share back
    load         `load_tensors`: checksums of all files verified, tensors filled in place

Before each read the files' pages are dropped from the cache, so both read from the disk. Printed:
medians, and medians over the rounds of the ratios.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megafp8.checkpoint import CheckpointRecord, Saver, load_tensors, save_checkpoint

TENSOR_BYTES = 8 * 2**20


def build(total_bytes: int, fill: bool) -> dict[str, Tensor]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    tensors: dict[str, Tensor] = {}
    rows = TENSOR_BYTES // ranks // 4 // 1024
    generator = torch.Generator().manual_seed(dist.get_rank())
    for index in range(total_bytes // TENSOR_BYTES):
        local = torch.empty(rows, 1024)
        if fill:
            local.random_(generator=generator)
        else:
            local.zero_()
        tensors[f"w{index}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return tensors


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(work: Callable[[], Any], before: Callable[[], None] | None = None) -> float:
    """Seconds from a common start until all ranks are done."""
    if before is not None and dist.get_rank() == 0:
        before()
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def raw_write(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.to_local().numpy()).cast("B"))  # type: ignore[attr-defined]
        os.fsync(file.fileno())


def raw_read(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in tensors.values():
            view = memoryview(tensor.to_local().numpy()).cast("B")  # type: ignore[attr-defined]
            assert file.readinto(view) == len(view)


def measure(
    rank: int, ranks: int, port: int, folder: str, total_bytes: int, rounds: int, queue: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    root = Path(folder)
    state, target = build(total_bytes, fill=True), build(total_bytes, fill=False)
    saver = Saver(background=True)
    rows = []
    for number in range(rounds + 1):  # the first one allocates buffers and is left out
        row: dict[str, float] = {}
        own = root / f"raw_{rank}"
        row["raw write"] = timed(lambda own=own: raw_write(own, state))
        row["raw read"] = timed(lambda own=own: raw_read(own, target), lambda: drop_pages(root))
        own.unlink()
        record = CheckpointRecord(iteration=number)
        row["save"] = timed(
            lambda n=number, r=record: save_checkpoint(root / "sync", n, state, r, keep_last=1)
        )
        saved = root / "sync" / f"iter_{number:07d}"
        row["load"] = timed(lambda d=saved: load_tensors(d, target), lambda: drop_pages(root))
        same = all(
            torch.equal(target[name].to_local(), tensor.to_local())  # type: ignore[attr-defined]
            for name, tensor in state.items()
        )
        assert same, "what was loaded is not what was saved"
        dist.barrier()
        began = time.perf_counter()
        saver.save(root / "async", number, state, record, keep_last=1)
        row["async"] = time.perf_counter() - began
        saver.wait()
        row["async complete"] = time.perf_counter() - began
        assert saver.last_error is None, saver.last_error
        dist.barrier()
        rows.append(row)
    blocked: list[Any] = [None] * ranks
    dist.all_gather_object(blocked, [row["async"] for row in rows])
    for index, row in enumerate(rows):
        row["async"] = max(times[index] for times in blocked)  # the slowest rank holds up the rest
    if rank == 0:
        queue.put(rows[1:])
    dist.barrier()
    dist.destroy_process_group()


def wait_for_rows(queue: Any, ranks: Sequence[Any], seconds: float) -> list[dict[str, float]]:
    """What rank 0 measured; ends the program if a rank dies before that, or time runs out."""
    until = time.monotonic() + seconds
    while True:
        try:
            return queue.get(timeout=1)
        except Empty:
            codes = [process.exitcode for process in ranks]
        if any(code not in (None, 0) for code in codes):
            sys.exit(f"bench/checkpoint.py: a rank died, exit codes by rank: {codes}")
        if time.monotonic() > until:
            sys.exit(f"bench/checkpoint.py: no result after {seconds:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of a checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="repeats behind each median (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="that save together (default: %(default)s)"
    )
    parser.add_argument("--folder", default=None, help="on the disk to measure (default: temp)")
    arguments = parser.parse_args()
    total = int(arguments.gigabytes * 2**30) // TENSOR_BYTES * TENSOR_BYTES
    folder = tempfile.mkdtemp(dir=arguments.folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = 20000 + os.getpid() % 20000
    ranks = [
        context.Process(
            target=measure,
            args=(rank, arguments.ranks, port, folder, total, arguments.rounds, queue),
            daemon=True,
        )
        for rank in range(arguments.ranks)
    ]
    try:
        for process in ranks:
            process.start()
        rows = wait_for_rows(queue, ranks, 560)
        for process in ranks:
            process.join()
    finally:
        for process in ranks:  # those that wait for one that died
            if process.pid is not None:
                process.kill()
                process.join()
        shutil.rmtree(folder)
    print(f"{total / 2**30:.2f} GiB of state, {arguments.ranks} ranks, {len(rows)} rounds")
    for name in rows[0]:
        seconds = statistics.median(row[name] for row in rows)
        print(f"{name:15s} {seconds:7.3f} s  {total / 2**30 / seconds:6.2f} GiB/s")
    for text, over, under in (
        ("save / raw write speed", "raw write", "save"),
        ("load / raw read speed", "raw read", "load"),
        ("async blocks / sync save", "async", "save"),
    ):
        ratio = statistics.median(row[over] / row[under] for row in rows)
        print(f"{text:25s} {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
