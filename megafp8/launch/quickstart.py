"""Trains what `scripts/quickstart.sh` prepared, for as many iterations as fit two minutes here.

python -m megafp8.launch.quickstart RUN_DIR DATA [TRAIN_ITERS]

Works in the project's folder. A few iterations are measured with the command of the run itself.
Where too few would fit, an iteration gets smaller: fewer samples, then fewer layers. What was
chosen is kept in the run folder, so that an interrupted run goes on to the same end.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.files import iteration_of
from megafp8.command.ending import INTERRUPTED, Ended, ended_by_signals, say
from megafp8.errors import LaunchError, MegaFP8Error
from megafp8.train.metrics import read_metrics

PLAN_FILE = "quickstart.json"
SECONDS = 120.0
MOST_ITERATIONS = 300
PROBED_ITERATIONS = 5
UNSTEADY_ITERATIONS = 1  # the first of a process takes its memory
CPU_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """What an iteration is made of.

    Attributes:
        samples: Of the global batch, nearly: a multiple of what the ranks take at once.
        layers: Of the model.
    """

    samples: int
    layers: int


# The fewest iterations that end below the unigram entropy with something to spare.
FEWEST_ITERATIONS = {
    Size(samples=16, layers=4): 40,
    Size(samples=8, layers=4): 60,
    Size(samples=4, layers=4): 60,
    Size(samples=4, layers=2): 60,
}
SIZES = tuple(FEWEST_ITERATIONS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: how long and how large."""

    train_iters: int
    size: Size


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to train on.

    Attributes:
        gpus: 0 for the CPU.
        emulates_fp8: The GPUs have no FP8 units.
    """

    gpus: int
    emulates_fp8: bool = False

    @property
    def ranks(self) -> int:
        """Processes: one a GPU, or 4 on the CPU."""
        return self.gpus or CPU_RANKS


def find_machine() -> Machine:
    """Look at this one.

    Raises:
        CalledProcessError: A GPU cannot be used; `output` has the words of CUDA.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Machine(gpus=0)
    # In another process: this one must hold none of a GPU's memory while the ranks are measured.
    look = "from megafp8.numerics.device_gemm import fp8_hardware as f; print(f('cuda')[0])"
    found = subprocess.run(
        [sys.executable, "-c", look],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Machine(gpus=gpus, emulates_fp8=found.stdout.splitlines()[-1:] != ["True"])


def training_command(machine: Machine, plan: Plan, data: Path) -> list[str]:
    """Return the command that trains, without the folders that it writes.

    Args:
        machine: Decides ranks and layout.
        plan: The schedule of the learning rate fits its iterations; a third of the run, or 100
            iterations, lie between two checkpoints and two evaluations.
        data: Folder with corpus and tokenizer.
    """
    size, ranks = plan.size, machine.ranks
    parallel = ranks % 4 == 0  # the preset's TP 2 x PP 2
    data_parallel = ranks // 4 if parallel else ranks
    micro_batch = 4 if size.samples >= 8 else 2
    unit = micro_batch * data_parallel
    micro_batches = max(2 if parallel else 1, round(size.samples / unit))
    values = {
        "config": "scripts/configs/tiny.yaml",
        "data-path": data / "stdlib_text_document",
        "tokenizer-model": data / "tokenizer",
        "num-layers": size.layers,
        "fsdp-size": data_parallel & -data_parallel,  # a power of two, as the hidden size is
        "micro-batch-size": micro_batch,
        "global-batch-size": unit * micro_batches,
        "train-iters": plan.train_iters,
        "lr-warmup-iters": min(20, plan.train_iters // 2),
        "eval-interval": _interval(plan.train_iters),
        "eval-iters": max(2, SIZES[0].samples * 2 // size.samples),  # on as many samples
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    if not parallel:
        flags += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
        flags += ["--no-sequence-parallel"]
    if machine.emulates_fp8:
        flags += ["--fp8-emulate"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), "pretrain_gpt.py", *flags]


def _interval(train_iters: int) -> int:
    return min(100, -(-train_iters // 3))


def measure(command: list[str], run_dir: Path) -> float:
    """Run a command's first iterations in a folder that is removed, below `run_dir`.

    Returns:
        Seconds of an iteration, the median of the steady ones.

    Raises:
        CalledProcessError: It failed; `output` is all that it said.
        LaunchError: It ended well before its second iteration.
    """
    with TemporaryDirectory(dir=run_dir, prefix="probe-") as folder:
        log = Path(folder) / "output.log"
        ends = ["--run-dir", folder, "--exit-interval", str(PROBED_ITERATIONS)]
        with log.open("wb") as output:
            code = _wait(subprocess.Popen([*command, *ends], stdout=output, stderr=output))
        if code:
            said = log.read_text(encoding="utf-8", errors="replace")
            raise subprocess.CalledProcessError(code, command, output=said)
        steady = [entry["step_time_s"] for entry in read_metrics(folder)[UNSTEADY_ITERATIONS:]]
        if not steady:
            raise LaunchError(f"{PROBED_ITERATIONS} iterations were run and left no times")
        return median(steady)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end, after a signal to this process, too: the ranks must not outlive it."""
    try:
        return process.wait()
    except KeyboardInterrupt:  # which a terminal sends to the process as well
        process.wait()
        raise
    except Ended:
        process.terminate()
        process.wait()
        raise


def fitting_iterations(seconds: float) -> int:
    """Return how many iterations of so many seconds fit two minutes, in tens, at most 300."""
    return min(MOST_ITERATIONS, int(SECONDS / seconds) // 10 * 10)


def fit(machine: Machine, data: Path, run_dir: Path) -> Plan:
    """Measure, say what was measured, and choose.

    Raises:
        CalledProcessError: The command of the run fails.
    """
    size = SIZES[0]
    seconds = _measured(machine, size, data, run_dir)
    while size != SIZES[-1] and fitting_iterations(seconds) < FEWEST_ITERATIONS[size]:
        _say(f"an iteration takes {seconds:.2f} s here: too few would fit, so it gets smaller")
        size = smaller_size(size, seconds)
        seconds = _measured(machine, size, data, run_dir)
    iterations = max(fitting_iterations(seconds), FEWEST_ITERATIONS[size])
    plan = Plan(train_iters=iterations, size=size)
    _say(describe_fit(plan, seconds))
    return plan


def smaller_size(size: Size, seconds: float) -> Size:
    """Return the largest of the smaller sizes whose iterations may be short enough, or the last.

    Args:
        size: Whose iterations are too long; not the last of `SIZES`.
        seconds: Of its iterations. Those of a smaller size take at least their share.
    """
    smaller = SIZES[SIZES.index(size) + 1 :]
    for candidate in smaller:
        share = candidate.samples * candidate.layers / (size.samples * size.layers)
        if fitting_iterations(seconds * share) >= FEWEST_ITERATIONS[candidate]:
            return candidate
    return smaller[-1]


def _measured(machine: Machine, size: Size, data: Path, run_dir: Path) -> float:
    _say(f"measuring iterations of {size.samples} samples, {size.layers} layers")
    plan = Plan(train_iters=MOST_ITERATIONS, size=size)
    return measure(training_command(machine, plan, data), run_dir)


def describe_fit(plan: Plan, seconds: float) -> str:
    """Return the line that tells of a choice.

    Args:
        plan: What was chosen.
        seconds: Of an iteration.
    """
    fits = SECONDS * 0.9 <= plan.train_iters * seconds <= SECONDS
    total = timedelta(seconds=round(plan.train_iters * seconds))
    return (
        f"an iteration takes {seconds:.2f} s here: {plan.train_iters} iterations "
        f"{'fit two minutes' if fits else f'take {total}'} (TRAIN_ITERS=N takes another number)"
    )


def read_plan(run_dir: Path) -> Plan | None:
    """Return what an earlier call chose for this folder; None if there was none.

    Raises:
        LaunchError: The file is not what `write_plan` wrote.
    """
    path = run_dir / PLAN_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Plan(train_iters=found["train_iters"], size=Size(**found["size"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            f"{path}: {error!r}; remove it, and give TRAIN_ITERS if there are checkpoints"
        ) from error


def write_plan(run_dir: Path, plan: Plan) -> None:
    """Keep what was chosen, for the next call; the file is replaced in one step."""
    temporary = run_dir / f"{PLAN_FILE}.tmp"
    temporary.write_text(json.dumps(dataclasses.asdict(plan)) + "\n", encoding="utf-8")
    os.replace(temporary, run_dir / PLAN_FILE)


def choose(run_dir: Path, data: Path, train_iters: int | None) -> tuple[Plan, int]:
    """Decide what a call is to train, and measure where nothing else decides.

    Args:
        run_dir: The run folder.
        data: Folder with corpus and tokenizer.
        train_iters: Asked for by the user; None for as many as an earlier call chose, or as fit.

    Returns:
        The plan, and the iterations that are done.
    """
    newest = find_checkpoint(run_dir / "checkpoints")
    completed = 0 if newest is None else iteration_of(newest.name) or 0
    plan = read_plan(run_dir)
    if plan is None and train_iters is None and not completed:
        return fit(find_machine(), data, run_dir), 0
    size = SIZES[0] if plan is None else plan.size
    planned = completed if plan is None else plan.train_iters
    return Plan(train_iters=train_iters or planned, size=size), completed


def main(run_dir: Path, data: Path, train_iters: int | None) -> int:
    """Train what is not trained yet; the process becomes that of the training command.

    Returns:
        The exit code, where there is nothing to train or a probe failed.
    """
    plan, completed = choose(run_dir, data, train_iters)
    if completed >= plan.train_iters:
        _say(f"{run_dir} has {completed} iterations: nothing to train")
        return 0
    write_plan(run_dir, plan)
    machine, checkpoints = find_machine(), str(run_dir / "checkpoints")
    _say(f"training: {plan.train_iters} iterations on {machine.ranks} ranks, run folder {run_dir}")
    command = training_command(machine, plan, data)
    command += ["--run-dir", str(run_dir), "--save", checkpoints, "--load", checkpoints]
    command += ["--save-interval", str(_interval(plan.train_iters))]
    os.execv(command[0], command)


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


def run_program(arguments: list[str]) -> int:
    """Run a command line; what a user can mend, and a failed probe's own words, go to stderr."""
    run_dir, data, *iterations = arguments
    try:
        with ended_by_signals():
            return main(Path(run_dir), Path(data), int(iterations[0]) if iterations else None)
    except subprocess.CalledProcessError as error:
        print(error.output, end="", file=sys.stderr)
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except MegaFP8Error as error:
        say(str(error), "quickstart.sh")
        return error.exit_code
    except Ended as ended:
        return ended.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:]))
