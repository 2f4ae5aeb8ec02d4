"""Kills runs with SIGKILL at random moments, most of them inside a save, and starts them again.

    python tests/tools/kill_runs.py --kills 60

After each kill the folder must name a checkpoint that verifies, the restart must go on from a
complete one, and in the end the losses must be those of a run that was never killed.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megafp8.checkpoint import find_checkpoint, read_record, verify_files  # noqa: E402
from tests.support.launches import TINY, Run, launched, train  # noqa: E402
from tests.support.limits import PATIENCE_S  # noqa: E402

ITERATIONS = 16
SAVE_INTERVAL = 2
# Seconds from the moment that a save's directory appears.
DELAYS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)


@dataclass
class Tally:
    """What the kills met.

    Attributes:
        kills: How many.
        inside: Of these, while the directory of an unfinished save was there.
        resumed: Iteration that each restart went on from, 0 where nothing was saved yet.
    """

    kills: int = 0
    inside: int = 0
    resumed: list[int] = field(default_factory=list)


def command(folder: Path, asynchronous: bool) -> list[str]:
    words = [*TINY, "--run-dir", str(folder), "--load", str(folder / "checkpoints")]
    words += ["--train-iters", str(ITERATIONS), "--save-interval", str(SAVE_INTERVAL)]
    words += ["--keep-last", "3"]
    return [*words, "--async-save"] if asynchronous else words


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """(iteration, loss, gradient norm) of every line of the metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["iteration"], row["loss"], row["grad_norm"]) for row in rows]


def unfinished(folder: Path) -> set[str]:
    root = folder / "checkpoints"
    return {path.name for path in root.glob("tmp_iter_*")} if root.is_dir() else set()


def kill_at_random(run: Run, folder: Path, rng: random.Random, leftovers: set[str]) -> bool:
    """Kill inside a save, or sometimes anywhere; tell whether a save was under way."""
    limit = time.monotonic() + PATIENCE_S
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0.0, 3.0))
    else:
        skip = rng.randrange(3)  # saves to let pass
        seen = set(leftovers)
        while run.processes[0].is_alive() and time.monotonic() < limit:
            new = unfinished(folder) - seen
            if new and skip:
                seen |= new
                skip -= 1
            elif new:
                time.sleep(rng.choice(DELAYS))
                break
            time.sleep(0.0005)
    run.kill()
    return bool(unfinished(folder) - leftovers)


def check_folder(folder: Path) -> int:
    """Return the iteration that a restart will go on from; its checkpoint must verify."""
    root = folder / "checkpoints"
    path = find_checkpoint(root) if root.is_dir() else None
    if path is None:
        return 0
    record = read_record(path)
    verify_files(path, record)
    assert record.data_position["consumed_samples"] == 4 * record.iteration
    return record.iteration


def kill_one_run(
    folder: Path, size: int, asynchronous: bool, kills: int, rng: random.Random, tally: Tally
) -> None:
    """Kill and restart a run until it has been killed `kills` times or reaches its end."""
    argv = command(folder, asynchronous)
    for attempt in range(kills):
        before = unfinished(folder)
        with launched(size, argv, folder / f"logs_{attempt}") as run:
            inside = kill_at_random(run, folder, rng, before)
            codes = run.wait()
        if codes == [0] * size:
            break
        assert set(codes) <= {-9, 0}, f"{codes}\n{run.text()}"
        tally.kills += 1
        tally.inside += inside
        tally.resumed.append(check_folder(folder))
    last = train(size, argv, folder / "logs_last")
    expected = check_folder(folder)
    assert expected == ITERATIONS, last.text()


def kill_runs(
    base: Path, kills: int, layouts: list[tuple[int, bool]], seed: int, per_run: int = 5
) -> Tally:
    """Kill `kills` times in all; layouts of (ranks, save beside training) take turns.

    Each run is killed about `per_run` times, all but the first of them after it was resumed.
    """
    rng, tally = random.Random(seed), Tally()
    wanted: dict[int, list[tuple[int, float, float]]] = {}
    turn = 0
    while tally.kills < kills:
        size, asynchronous = layouts[turn % len(layouts)]
        turn += 1
        if size not in wanted:
            folder = base / f"straight_{size}"
            train(size, command(folder, False), folder / "logs")
            wanted[size] = losses(folder)
        missing = kills - tally.kills
        number = math.ceil(missing / math.ceil(missing / per_run))
        # Not named by the kills so far: a run that came to its end first leaves them as they were.
        folder = base / f"run_{turn}"
        kill_one_run(folder, size, asynchronous, number, rng, tally)
        assert losses(folder) == wanted[size], f"{folder}: another run than the uninterrupted one"
        how = "beside training" if asynchronous else "in line"
        print(f"{size} ranks, saves {how}: {tally.kills} kills so far", flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="in all (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the moments (default: %(default)s)"
    )
    arguments = parser.parse_args()
    layouts = [(2, False), (2, True), (4, False), (4, True)]
    with tempfile.TemporaryDirectory() as base:
        tally = kill_runs(Path(base), arguments.kills, layouts, arguments.seed)
    fresh = sum(iteration == 0 for iteration in tally.resumed)
    print(
        f"{tally.kills} kills, {tally.inside} inside a save; {fresh} restarts before the first "
        f"checkpoint, the others from iterations {sorted(set(tally.resumed) - {0})}; losses equal"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
