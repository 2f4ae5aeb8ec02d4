"""The loss curve's picture and the text summary, from run folders written by the trainer."""

import math

import numpy as np
import pytest
from matplotlib.image import imread

from megafp8.errors import DataError
from megafp8.report.curves import plot_loss_curve, running_mean
from megafp8.report.summary import summarize_run
from megafp8.train.metrics import IterationMetrics, MetricsWriter


def make_run(folder, losses, validation=(), skipped=()):
    writer = MetricsWriter(folder, enabled=True, total_iterations=len(losses), log_interval=10**6)
    for iteration, loss in enumerate(losses, start=1):
        writer.write(
            IterationMetrics(
                iteration=iteration, loss=loss, grad_norm=1.0, lr=1e-3, tokens=512,
                consumed_samples=8 * iteration, step_time_s=0.1,
                tokens_per_s=10.0 if iteration == 1 else 5000.0 + iteration,
                tflops_per_device=None, mfu=None, mem_peak_bytes=None,
                skipped=iteration in skipped, global_batch_size=8,
                valid_loss=loss + 0.1 if iteration in validation else None,
            )
        )  # fmt: skip
    writer.close()
    return folder


def colours_of(path):
    """Return the set of colours in a picture, as hex."""
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    codes = np.unique(pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2])
    return {f"#{code:06X}" for code in codes}


def test_the_picture_is_drawn_and_readable_in_size(tmp_path):
    losses = [6.0 * math.exp(-i / 40) + 1 + 0.3 * math.sin(i) for i in range(120)]
    run = make_run(tmp_path / "run", losses, validation=(40, 80, 120))
    output = tmp_path / "loss.png"
    plot_loss_curve(run, output, 5.2)
    assert imread(output).shape[:2] == (675, 1200)
    assert "#0072B2" in colours_of(output) and "#666666" in colours_of(output)


def test_a_run_with_non_finite_losses_is_drawn_with_gaps(tmp_path):
    run = make_run(tmp_path / "run", [3.0, math.nan, 2.0, math.inf, 1.0])
    plot_loss_curve(run, tmp_path / "loss.png", 1.0)
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("losses", [[], [math.nan, math.nan]])
def test_a_run_without_a_finite_loss_is_an_error(tmp_path, losses):
    run = make_run(tmp_path / "run", losses)
    with pytest.raises(DataError, match="no finite loss"):
        plot_loss_curve(run, tmp_path / "loss.png", 1.0)


def test_running_mean_is_centred_and_skips_gaps():
    assert running_mean([0.0, 0.0, 3.0, 0.0, 9.0], 2)[-1] == 4.0
    assert running_mean([1.0, 2.0, 6.0, math.nan, 5.0], 1) == [1.0, 3.0, 4.0, 5.5, 5.0]
    assert math.isnan(running_mean([math.nan, math.nan, math.nan, 1.0], 1)[1])


def test_summary_lines(tmp_path):
    run = make_run(tmp_path / "run", [5.0, 4.0, 3.125], validation=(2,), skipped=(1,))
    assert summarize_run(run).splitlines() == [
        f"run folder:         {run}",
        "iterations:         3",
        "final loss:         3.1250",
        "last valid loss:    4.1000 (iteration 2)",
        "tokens/s (median):  5,002",
        "skipped iterations: 1",
    ]


def test_summary_leaves_out_what_did_not_happen(tmp_path):
    names = [line.split(":")[0] for line in summarize_run(make_run(tmp_path, [2.0])).splitlines()]
    assert names == ["run folder", "iterations", "final loss", "tokens/s (median)"]


def test_summary_of_no_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no metrics.jsonl"):
        summarize_run(tmp_path)
    with pytest.raises(DataError, match="no iteration"):
        summarize_run(make_run(tmp_path, []))
