"""metrics.jsonl, its truncation on resume, and the iteration line."""

import io
import json
import math
import re
from datetime import datetime

import pytest
from rich.console import Console

from megafp8.errors import DataError
from megafp8.train.metrics import (
    Interval,
    IterationMetrics,
    MetricsWriter,
    iteration_line,
    read_metrics,
)
from megafp8.train.progress import ProgressBar

KEYS = [
    "iteration", "loss", "grad_norm", "lr", "tokens", "consumed_samples", "step_time_s",
    "tokens_per_s", "tflops_per_device", "mfu", "mem_peak_bytes", "skipped", "comm_bytes",
    "comm_calls",
]  # fmt: skip


def metrics(iteration, **changes):
    values = {
        "iteration": iteration, "loss": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens": 512,
        "consumed_samples": 8 * iteration, "step_time_s": 0.25, "tokens_per_s": 2048.0,
        "tflops_per_device": 0.5, "mfu": None, "mem_peak_bytes": None, "skipped": False,
        "comm_bytes": {"loss": {"float32": 8}}, "comm_calls": {"loss": 1}, "global_batch_size": 8,
    }  # fmt: skip
    return IterationMetrics(**{**values, **changes})


def writer(folder, **changes):
    settings = {"enabled": True, "total_iterations": 100, "log_interval": 2}
    return MetricsWriter(folder, **{**settings, **changes})


def test_line_has_megatrons_words_order_and_formats():
    line = iteration_line(
        metrics(7, loss_scale=65536.0),
        total_iterations=100,
        loss=2.125,
        elapsed_ms=250.04,
        skipped_iterations=1,
        nan_iterations=0,
    )
    assert line == (
        " iteration        7/     100 | consumed samples:           56 |"
        " elapsed time per iteration (ms): 250.0 | learning rate: 3.000000E-04 |"
        " global batch size:     8 | lm loss: 2.125000E+00 | loss scale: 65536.0 |"
        " grad norm: 1.250 | number of skipped iterations:   1 |"
        " number of nan iterations:   0 |"
    )


def test_line_with_everything_that_can_be_asked_for():
    line = iteration_line(
        metrics(7, params_norm=12.0, num_zeros_in_grad=3, grad_norm=math.nan),
        total_iterations=100,
        loss=math.nan,
        elapsed_ms=250.0,
        skipped_iterations=0,
        nan_iterations=1,
        throughput=123.45,
        timestamp=datetime(2030, 1, 2, 3, 4, 5, 678),
    )
    assert line.startswith(" [2030-01-02 03:04:05.000678] iteration        7/     100 |")
    words = [part.split(":")[0].strip() for part in line.split("] ")[1].split("|")[1:-1]]
    assert words == [
        "consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)",
        "learning rate", "global batch size", "lm loss", "loss scale", "grad norm", "num zeros",
        "params norm", "number of skipped iterations", "number of nan iterations",
    ]  # fmt: skip
    assert "lm loss: NAN |" in line and "grad norm: nan |" in line
    assert "(TFLOP/s/GPU): 123.5 |" in line


def test_a_gradient_norm_that_was_not_computed_is_left_out():
    interval = Interval()
    interval.add(metrics(1, grad_norm=None))
    assert "grad norm" not in interval.line(10, with_throughput=False)


def test_the_interval_averages_over_the_steps_that_were_taken():
    interval = Interval()
    interval.add(metrics(1, loss=4.0, step_time_s=0.1, tflops_per_device=1.0))
    interval.add(metrics(2, loss=math.nan, skipped=True, step_time_s=0.2, tflops_per_device=1.0))
    interval.add(metrics(3, loss=3.0, step_time_s=0.3, tflops_per_device=4.0))
    line = interval.line(10, with_throughput=True)
    assert "lm loss: 3.500000E+00" in line
    assert "(ms): 200.0 |" in line
    assert "(TFLOP/s/GPU): 2.5 |" in line  # (0.1 + 0.2 + 1.2) / 0.6
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in line
    # The next interval starts over.
    interval.add(metrics(4, loss=1.0))
    assert "lm loss: 1.000000E+00" in interval.line(10, with_throughput=False)


def test_an_interval_of_skipped_steps_shows_the_last_loss():
    interval = Interval()
    interval.add(metrics(1, loss=5.0, skipped=True))
    interval.add(metrics(2, loss=math.inf, skipped=True))
    line = interval.line(10, with_throughput=False)
    assert "lm loss: INF |" in line and "skipped iterations:   2 |" in line


def test_entries_have_the_published_keys_and_are_flushed(tmp_path):
    sink = writer(tmp_path)
    sink.write(metrics(1))
    extra = {"extra_losses": {"balance": math.inf}}
    sink.write(metrics(2, valid_loss=2.75, loss=math.nan, grad_norm=math.inf, **extra))
    # Read while the writer is still open.
    first, second = (
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert list(first)[: len(KEYS)] == KEYS and not {"valid_loss", "extra_losses"} & first.keys()
    assert first["mfu"] is None and first["comm_bytes"] == {"loss": {"float32": 8}}
    assert second["valid_loss"] == 2.75
    assert (second["loss"], second["grad_norm"]) == ("nan", "inf")
    read = read_metrics(tmp_path)
    assert math.isnan(read[1]["loss"]) and read[1]["grad_norm"] == math.inf
    assert read[1]["extra_losses"] == {"balance": math.inf}
    sink.close()


def test_a_resumed_run_repeats_no_iteration(tmp_path):
    first = writer(tmp_path)
    for iteration in range(1, 6):
        first.write(metrics(iteration, loss=1.0))
    first.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"iteration": 3, "lo')  # killed while writing
    second = writer(tmp_path, resumed_iteration=3)
    for iteration in range(4, 7):
        second.write(metrics(iteration, loss=2.0))
    second.close()
    read = read_metrics(tmp_path)
    assert [entry["iteration"] for entry in read] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in read] == [1.0] * 3 + [2.0] * 3
    assert len(path.read_text().splitlines()) == 6


def test_a_fresh_run_sets_another_runs_entries_aside(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="megafp8"):
        for loss in (1.0, 2.0, 3.0):  # within one second
            sink = writer(tmp_path)
            sink.write(metrics(1, loss=loss))
            sink.close()
        writer(tmp_path / "new").close()
        writer(tmp_path / "new").close()  # it had come to no iteration
    assert [entry["loss"] for entry in read_metrics(tmp_path)] == [3.0]
    aside = sorted(set(tmp_path.glob("metrics.*.jsonl")))
    assert sorted(json.loads(path.read_text())["loss"] for path in aside) == [1.0, 2.0]
    assert len(caplog.records) == 2 and f"it is {aside[0].name} now" in caplog.text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["metrics.jsonl"]


def test_resuming_at_the_last_entry_leaves_the_file_alone(tmp_path):
    first = writer(tmp_path)
    first.write(metrics(1))
    first.close()
    path = tmp_path / "metrics.jsonl"
    before = path.stat().st_ino
    writer(tmp_path, resumed_iteration=1).close()
    assert path.stat().st_ino == before and len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(
    ("resumed", "total", "interval", "ran", "printed"),
    [
        (0, 100, 2, 6, [1, 2, 4, 6]),
        (3, 100, 2, 8, [4, 6, 8]),
        (0, 4, 10, 4, [1, 4]),
        (4, 10, 4, 10, [5, 8, 10]),
        (0, 100, 10, 7, [1, 7]),  # stopped early
        (6, 7, 10, 7, [7]),
        (7, 7, 10, 7, []),
    ],
)
def test_lines_are_printed_at_multiples_of_the_interval_first_and_last(
    resumed, total, interval, ran, printed, tmp_path, capsys
):
    sink = writer(
        tmp_path, resumed_iteration=resumed, total_iterations=total, log_interval=interval
    )
    for iteration in range(resumed + 1, ran + 1):
        sink.write(metrics(iteration))
    sink.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.search(r"iteration +(\d+)/ +\d+ ", line)[1]) for line in lines] == printed
    if not lines:
        return
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration ", lines[0])


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    sink = writer(tmp_path / "run", enabled=False, log_interval=1)
    sink.write(metrics(1))
    sink.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_observers_see_every_iteration_and_are_closed(tmp_path):
    class Recorder:
        def __init__(self):
            self.seen = []

        def observe(self, metrics):
            self.seen.append(metrics.iteration)

        def close(self):
            self.seen.append("closed")

    recorder = Recorder()
    sink = writer(tmp_path, observers=[recorder])
    sink.write(metrics(1))
    sink.write(metrics(2))
    sink.close()
    assert recorder.seen == [1, 2, "closed"]


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}: no metrics.jsonl"):
        read_metrics(tmp_path)


def progress(total, seconds, completed=0, **terminal):
    """A progress bar whose iterations take so many seconds each, and where it is drawn."""
    screen, now = io.StringIO(), iter(range(1000))
    bar = ProgressBar(
        total,
        completed=completed,
        console=Console(file=screen, width=120, **terminal),
        clock=lambda: next(now) * seconds,
    )
    return bar, screen


def test_progress_is_drawn_on_terminals(caplog):
    bar, screen = progress(10, seconds=40.0, completed=3, force_terminal=True)
    with caplog.at_level("INFO", logger="megafp8"):
        bar.observe(metrics(4, loss=2.5))
        assert "left" not in screen.getvalue()  # one iteration is no pace
        bar.observe(metrics(5, loss=2.5))
    bar.close()
    bar.close()
    assert "5/10" in screen.getvalue() and "0:03:20 left" in screen.getvalue()
    assert "loss 2.5000" in screen.getvalue() and "2,048 tokens/s" in screen.getvalue()
    assert not caplog.messages


def test_a_log_has_the_time_left_at_every_tenth_of_the_run(caplog):
    bar, screen = progress(50, seconds=3.0, completed=29, force_terminal=False)
    with caplog.at_level("INFO", logger="megafp8"):
        for iteration in range(30, 51):
            bar.observe(metrics(iteration))
    bar.close()
    assert screen.getvalue() == ""
    assert caplog.messages == [
        "iteration 35 of 50: 0:00:45 left",
        "iteration 40 of 50: 0:00:30 left",
        "iteration 45 of 50: 0:00:15 left",
    ]


def test_nobody_who_reads_along_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    """`... | tee log` whose reader has died, or a log file on a full disk."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    with caplog.at_level("WARNING", logger="megafp8"), monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Gone())
        out = writer(tmp_path, log_interval=1)
        for iteration in (1, 2, 3):
            out.write(metrics(iteration))
        out.close()
    assert [entry["iteration"] for entry in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(caplog.records) == 1 and "stdout: [Errno 32] Broken pipe" in caplog.text
