"""A run is measured, and the figures are those that its training wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.config.load import load_run
from maxdiffusion.errors import UsageError
from maxdiffusion.train.evaluate import evaluate_run
from maxdiffusion.train.run import TrainResult
from tests.train.runs import read_lines


def test_a_run_is_measured_and_the_figures_are_kept(trained: TrainResult) -> None:
    result = evaluate_run(trained.run, num_seeds=2)
    assert isinstance(result.learned, bool)  # a numpy one cannot be written as JSON
    assert (result.step, result.held_out_pairs, result.gallery, result.seeds) == (6, 5, 5, 2)
    assert result.chance == 1 / 5
    assert result.retrieval_interval[0] <= result.retrieval <= result.retrieval_interval[1]
    assert result.samples == trained.samples
    assert result.pictures.is_file()
    kept = json.loads((trained.run / "evaluation.json").read_text())
    assert kept["held_out_loss"] == result.held_out_loss
    assert "times chance" in (trained.run / "report.html").read_text()
    # The same losses as the training measured at its last step, with the same noise.
    (line,) = [line for line in read_lines(trained.run / "metrics.jsonl") if "held_out_loss" in line]
    np.testing.assert_allclose(
        (result.held_out_loss, result.unconditional_loss),
        (line["held_out_loss"], line["unconditional_loss"]),
        rtol=1e-5,
    )
    # Eight equidistant times, whose mean is the loss.
    assert len(result.held_out_loss_by_time) == 8
    np.testing.assert_allclose(np.mean(result.held_out_loss_by_time), result.held_out_loss, rtol=1e-6)
    np.testing.assert_allclose(line["held_out_loss_by_time"], result.held_out_loss_by_time, rtol=1e-5)


def test_pictures_are_compared_while_a_run_trains(trained: TrainResult) -> None:
    """One picture a pair, so shares are fifths; a Fréchet distance on features of length 1 lies between 0 and 4."""
    (line,) = [line for line in read_lines(trained.run / "metrics.jsonl") if "retrieval" in line]
    assert line["retrieval"] * 5 == pytest.approx(round(line["retrieval"] * 5))
    assert 0 < line["pictures_frechet"] < 4


def test_a_run_without_held_out_pairs_is_refused(trained: TrainResult) -> None:
    recipe = load_run(trained.run, ["data.split=all"]).recipe
    with pytest.raises(UsageError, match=r"holds no \(concept, style\) pairs out"):
        evaluate_run(Path(trained.run), recipe=recipe)
