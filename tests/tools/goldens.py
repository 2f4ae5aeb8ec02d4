"""Proves that a change of the code changes no number and no text that users meet.

    python tests/tools/goldens.py                          against tests/golden/
    python tests/tools/goldens.py --against main~5         against another commit, exactly
    python tests/tools/goldens.py --write                  renew tests/golden/, on purpose only
    python tests/tools/goldens.py --only delayed text      results whose name holds one of the words

What is compared: the losses and gradient norms of 100 iterations for each precision at each layout,
the bytes of every tensor in the checkpoints they end with, the files that conversion makes of one,
`--help` and three `--dry-run`s. All of it comes from the command lines of users, so that nothing
here has to change with the code.

Losses follow from how a CPU multiplies. With --against both commits run on this machine and every
digit counts, in some ten minutes each. `tests/golden/` counts exactly on the kind of CPU that wrote
it, which it names; on another kind losses have to lie within `BOUND`, and digests are left out.
Exit code 1: something differs, listed. With --results FILE the other commit's results are kept and
not made again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.launches import free_port  # noqa: E402

STORED = ROOT / "tests/golden"
ITERATIONS = 100
# Relative, of losses; between CPUs that multiply BF16 as FP32 with one rounding and others.
BOUND = 0.01
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128", "--swiglu"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--disable-bias-linear", "--hidden-dropout", "0.1", "--attention-dropout", "0.0"),
    *("--make-vocab-size-divisible-by", "64", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "255", "--mock-data", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--lr", "1e-3", "--lr-warmup-iters", "10", "--clip-grad", "1.0", "--bf16"),
    *("--train-iters", str(ITERATIONS), "--log-interval", "10", "--eval-interval", "50"),
    *("--eval-iters", "1", "--save-interval", str(ITERATIONS)),
)
PRECISIONS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "delayed": ("--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
}
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tp2": (2, TP2),
    "tp2pp2": (4, (*TP2, "--pipeline-model-parallel-size", "2")),
    "fsdp2": (2, ()),
}
# Checkpoints whose tensors are compared: with scale state, and one without.
SAVED = (("delayed", "one"), ("delayed", "tp2"), ("delayed", "tp2pp2"), ("delayed", "fsdp2"),
         ("bf16", "fsdp2"))  # fmt: skip
CONVERTED = ("hf", "megatron")
TEXTS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "dry_run_tiny": ("--config", "scripts/configs/tiny.yaml", "--mock-data", "--tokenizer-type",
                     "NullTokenizer", "--dry-run", "--world-size", "4"),
    "dry_run_8b": ("--config", "scripts/configs/llama3_8b.yaml", "--mock-data", "--tokenizer-type",
                   "NullTokenizer", "--dry-run", "--world-size", "8"),
    "dry_run_70b": ("--config", "scripts/configs/llama3_70b.yaml", "--mock-data",
                    "--tokenizer-type", "NullTokenizer", "--dry-run", "--world-size", "64"),
}  # fmt: skip

Results = dict[str, Any]  # "losses/delayed/tp2" -> values


def environment(tree: Path, **more: str) -> dict[str, str]:
    """The environment of a process that runs the code of a tree."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **more}


def run_tool(tree: Path, *command: str) -> str:
    """Run a script of a tree in its root and return what it printed.

    Raises:
        SystemExit: it failed; with what it printed.
    """
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment(tree), text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {tree}: {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def train(tree: Path, size: int, flags: tuple[str, ...], folder: Path) -> None:
    """Train on `size` processes, with run folder and checkpoints below `folder`.

    Raises:
        SystemExit: a rank failed; with what it printed.
    """
    command = [sys.executable, "pretrain_gpt.py", *MODEL, *flags]
    command += ["--run-dir", str(folder), "--save", str(folder / "checkpoints")]
    port = str(free_port())
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        log = (folder.parent / f"{folder.name}_{rank}.log").open("w+")
        ranks.append(
            (subprocess.Popen(command, cwd=tree, env=environment(tree, **place), stdout=log,
                              stderr=subprocess.STDOUT), log)
        )  # fmt: skip
    codes = [process.wait() for process, _ in ranks]
    for code, (_, log) in zip(codes, ranks, strict=True):
        log.seek(0)
        text = log.read()
        log.close()
        if code:
            raise SystemExit(f"{' '.join(command)} in {tree}: {codes}\n{text[-4000:]}")


def curve(folder: Path) -> list[list[str]]:
    """[loss, gradient norm] of each iteration in `metrics.jsonl`, in full precision."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(json.loads, lines) if "loss" in entry]
    return [[repr(entry["loss"]), repr(entry["grad_norm"])] for entry in entries]


def tensor_digests(folder: Path) -> dict[str, str]:
    """Digest of each tensor of a checkpoint, as torch's own reader finds it."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = next(path.parent for path in sorted(folder.rglob(".metadata")))
    reader = dcp.FileSystemReader(found)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {
        name: digest(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, value in sorted(state.items())
    }


def digest(content: bytes) -> str:
    """The first 64 bits of a sha256."""
    return hashlib.sha256(content).hexdigest()[:16]


def collect(tree: Path, words: Sequence[str] = ()) -> Results:
    """What is compared and bears one of the words in its name, made by the code of a tree."""

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    results: Results = {
        f"text/{name}": run_tool(tree, "pretrain_gpt.py", *flags)
        for name, flags in TEXTS.items()
        if wanted(f"text/{name}")
    }
    with tempfile.TemporaryDirectory(prefix="goldens_") as made:
        kinds = [kind for kind in CONVERTED if wanted(f"files/{kind}")]
        curves = [(p, layout) for p in PRECISIONS for layout in LAYOUTS]
        curves = [names for names in curves if wanted("losses/" + "/".join(names))]
        saved = [names for names in SAVED if wanted("tensors/" + "/".join(names))]
        runs = sorted({*curves, *saved, *([("delayed", "one")] if kinds else [])})

        def run(precision: str, layout: str) -> None:
            size, flags = LAYOUTS[layout]
            folder = Path(made) / f"{precision}_{layout}"
            train(tree, size, (*PRECISIONS[precision], *flags), folder)
            print(f"{precision} {layout}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda names: run(*names), runs))
        for precision, layout in curves:
            folder = Path(made) / f"{precision}_{layout}"
            results[f"losses/{precision}/{layout}"] = curve(folder)
        for precision, layout in saved:
            folder = Path(made) / f"{precision}_{layout}" / "checkpoints"
            results[f"tensors/{precision}/{layout}"] = tensor_digests(folder)
        source = Path(made) / "delayed_one/checkpoints"
        for kind in kinds:
            target = Path(made) / kind
            convert = ("tools/convert_checkpoint.py", "--from", "megafp8", "--to", kind)
            run_tool(tree, *convert, "--load", str(source), "--save", str(target))
            results[f"files/{kind}"] = {
                str(path.relative_to(target)): digest(path.read_bytes())
                for path in sorted(target.rglob("*"))
                if path.is_file()
            }
    return results


def differences(before: Results, now: Results, exactly: bool) -> Iterator[str]:
    """Say what is not the same; losses within `BOUND` where the CPUs are of two kinds."""
    for name in sorted(before.keys() | now.keys()):
        one, other = before.get(name), now.get(name)
        kind = name.split("/")[0]
        if one is None or other is None:
            yield f"{name}: only {'now' if one is None else 'before'}"
        elif kind == "text" and one != other:
            pairs = zip(f"{one}\n".split("\n"), f"{other}\n".split("\n"), strict=False)
            line = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            yield f"{name}: {line[0]!r} became {line[1]!r}"
        elif kind == "losses":
            yield from _apart(name, one, other, 0.0 if exactly else BOUND)
        elif exactly and one != other:
            changed = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
            yield f"{name}: {len(changed)} of {len(one)} differ, the first {changed[0]}"


def _apart(name: str, one: list[list[str]], other: list[list[str]], bound: float) -> Iterator[str]:
    if len(one) != len(other):
        yield f"{name}: {len(one)} iterations became {len(other)}"
    for iteration, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        same = a == b if not bound else abs(float(a[0]) / float(b[0]) - 1) <= bound
        if not same:
            yield f"{name}: iteration {iteration}: loss and norm {a} became {b}"
            return


def cpu_kind() -> str:
    """How this machine multiplies: processor's model and the units that matter."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split("\t: ", 1) for line in text.splitlines() if "\t: " in line)
    named = {key.strip(): value for key, value in fields.items()}
    units = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(named.get("flags", "").split())
    return ", ".join([named.get("model name", "unknown"), *sorted(units)])


def read_stored() -> tuple[str, Results]:
    """Kind of CPU and results of `tests/golden/`."""
    stored: Results = json.loads((STORED / "results.json").read_text(encoding="utf-8"))
    texts = {f"text/{name}": (STORED / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS}
    return stored.pop("cpu"), stored | texts


def write_stored(results: Results) -> None:
    """Renew `tests/golden/`."""
    STORED.mkdir(exist_ok=True)
    texts = {name.partition("/")[2]: text for name, text in results.items() if "text/" in name}
    for name, text in texts.items():
        (STORED / f"{name}.txt").write_text(text, encoding="utf-8")
    rest = {name: value for name, value in results.items() if "text/" not in name}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(rest.items())]
    text = "{\n" + ",\n".join([f'"cpu": {json.dumps(cpu_kind())}', *lines]) + "\n}\n"
    (STORED / "results.json").write_text(text, encoding="utf-8")


def of_commit(revision: str, kept: Path | None) -> Results:
    """Results of another commit, in a tree of its own."""
    if kept is not None and kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="goldens_tree_") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            results = collect(tree)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    if kept is not None:
        kept.write_text(json.dumps(results), encoding="utf-8")
    return results


def main() -> int:
    """Collect, compare, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="run it, too, and compare exactly")
    parser.add_argument("--results", type=Path, help="file that keeps the results of --against")
    parser.add_argument("--write", action="store_true", help="renew tests/golden/")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in a result's name")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write renews all")
    now = collect(ROOT, arguments.only)
    if arguments.write:
        write_stored(now)
        return 0
    if arguments.against:
        kind, before = cpu_kind(), of_commit(arguments.against, arguments.results)
    else:
        kind, before = read_stored()
    exactly = kind == cpu_kind()
    if arguments.only:
        before = {name: value for name, value in before.items() if name in now}
    found = list(differences(before, now, exactly))
    print("\n".join(found) or f"{len(now)} results are the same")
    if not exactly:
        print(f"(written on {kind}; here {cpu_kind()}: losses within {BOUND}, no digests)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
