"""Whole runs that go on from a checkpoint with other settings, ranks or corpora."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.checkpoint import find_checkpoint, read_record
from megafp8.data.indexed_dataset import IndexedDatasetWriter
from tests.support.corpora import add_document
from tests.support.launches import TINY, Run, launched, train

PLAIN = ("--fp8-format", "none", "--num-workers", "0")


def command(folder: Path, *more: str) -> list[str]:
    """A tiny run that goes on from its own folder; later flags replace earlier ones."""
    values: dict[str, list[str]] = {}
    places = ("--run-dir", str(folder), "--load", str(folder / "checkpoints"))
    for word in (*TINY, *PLAIN, *places, *more):
        if word.startswith("--"):
            rest = values[word] = []
        else:
            rest.append(word)
    for name in [name for name in values if name.startswith("--without-")]:
        values.pop(name)
        values.pop(f"--{name.removeprefix('--without-')}")
    return [word for name, rest in values.items() for word in (name, *rest)]


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def position(folder: Path) -> tuple[int, int]:
    checkpoint = find_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    record = read_record(checkpoint)
    return record.iteration, record.data_position["consumed_samples"]


def printed(run: Run) -> list[str]:
    """`n/total` of the iteration lines."""
    return re.findall(r"iteration +(\d+/ *\d+) \|", run.output(0))


# ------------------------------------------------------------------ from samples to iterations


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 samples in batches of 8, stopped after 40."""
    folder = tmp_path_factory.mktemp("half")
    flags = ("--global-batch-size", "8", "--train-samples", "80", "--exit-interval", "5")
    train(1, command(folder, *flags), folder / "logs")
    assert position(folder) == (5, 40)
    return folder


@pytest.mark.parametrize(
    ("batch", "end", "words"),
    [
        ("4", (15, 80), "now ends at iteration 15 with 80 samples, was iteration 10 with 80"),
        ("16", (7, 72), "8 of --train-samples 80 are left over: the next batch of 16 would not"),
    ],
)
def test_a_budget_of_samples_counts_from_where_the_run_goes_on(
    half_way: Path, tmp_path: Path, batch: str, end: tuple[int, int], words: str
) -> None:
    folder = shutil.copytree(half_way, tmp_path / "run")
    flags = ("--global-batch-size", batch, "--train-samples", "80")
    run = train(1, command(folder, *flags), folder / "logs")
    assert position(folder) == end
    (told,) = [line for line in run.output(0).splitlines() if "going on at iteration 5" in line]
    assert words in told, told
    assert printed(run)[-1].replace(" ", "") == f"{end[0]}/{end[0]}"
    rates = [entry["lr"] for entry in entries(folder)]
    assert min(rates[5:]) > 0.0


def test_a_budget_of_samples_is_kept_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Without --global-batch-size each rank takes a micro-batch."""
    flags = ("--without-global-batch-size", "--micro-batch-size", "2", "--train-samples", "40")
    two = command(tmp_path, *flags, "--exit-interval", "5")
    train(2, two, tmp_path / "two")
    assert position(tmp_path) == (5, 20)
    run = train(1, command(tmp_path, *flags), tmp_path / "one")
    assert position(tmp_path) == (15, 40), run.text()
    assert "global_batch_size was 4, now 2 (iterations and evaluations take" in run.output(0)
    again = train(1, command(tmp_path, *flags), tmp_path / "again")
    assert "--train-samples 40 leaves nothing to train" in again.output(0), again.text()


# ----------------------------------------------------------------------------- what was read


def write_corpus(prefix: Path, documents: int, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            add_document(writer, draw.integers(0, 51, 40))


def test_a_corpus_that_changed_behind_its_path_is_refused_unless_meant(tmp_path: Path) -> None:
    prefix, folder = tmp_path / "corpus", tmp_path / "run"
    write_corpus(prefix, 20)
    data = ("--without-mock-data", "--data-path", str(prefix), "--split", "1")
    first = command(folder, *data, "--train-iters", "4", "--exit-interval", "2")
    train(1, first, tmp_path / "first")
    write_corpus(prefix, 24)
    more = command(folder, *data, "--train-iters", "4")
    with launched(1, more, tmp_path / "grown") as run:
        assert run.wait() == [2], run.text()
    line = run.output(0).strip().splitlines()[-1]
    assert f"--data-path {prefix} is not what it was at iteration 2: 20 documents, 800" in line
    assert "24 documents, 960" in line and "give --allow-changed-corpus: from sample 8 on" in line
    assert position(folder) == (2, 8) and len(entries(folder)) == 2

    run = train(1, [*more, "--allow-changed-corpus"], tmp_path / "meant")
    assert position(folder) == (4, 16)
    assert "is not what it was at iteration 2: 20 documents" in run.output(0)
    (resume,) = [
        event
        for event in map(json.loads, (folder / "audit.jsonl").read_text().splitlines())
        if event["event"] == "resume"
    ]
    assert "24 documents, 960 tokens" in resume["changes"][0]

    # What was meant once is no change any more, and a place is no content.
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").rename(tmp_path / f"elsewhere{suffix}")
    data = ("--without-mock-data", "--data-path", str(tmp_path / "elsewhere"), "--split", "1")
    run = train(1, command(folder, *data, "--train-iters", "4"), tmp_path / "moved")
    assert "other settings" not in run.output(0) and "fingerprint" not in run.output(0)
    assert "--train-iters 4 leaves nothing to train" in run.output(0)
