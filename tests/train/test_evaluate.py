"""Figures are what they say: nearest targets, and intervals that hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.config.load import load_run
from maxdiffusion.data.pictures import pictures
from maxdiffusion.errors import UsageError
from maxdiffusion.train.evaluate import (
    clustered_interval,
    evaluate_run,
    nearest_is_own,
    other_styles,
    thumbnails,
    wilson_interval,
)
from maxdiffusion.train.run import TrainResult
from tests.train.runs import read_lines


def test_thumbnails_are_means_of_areas() -> None:
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    pixels[0, :2, :2] = [[[0] * 3, [100] * 3], [[100] * 3, [200] * 3]]
    small = thumbnails(pixels).reshape(16, 16, 3)
    assert (small[0, 0] == 100).all()
    assert small.sum() == 300


def test_the_nearest_target_is_found() -> None:
    targets = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    made = np.stack([targets, targets[::-1]], axis=1)
    right = nearest_is_own(made, targets)
    assert right[:, 0].all()
    assert right[:, 1].tolist() == [False, False, True, False, False]


def test_a_tie_is_not_right() -> None:
    targets = np.zeros((3, 16, 16, 3), np.uint8)
    targets[2] = 255
    assert nearest_is_own(targets[:, None], targets)[:, 0].tolist() == [False, False, True]


def test_wilson_at_known_values() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263, 0 of 20.
    np.testing.assert_allclose(wilson_interval(81 / 263, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson_interval(0.0, 20), (0.0, 0.1611), atol=5e-5)


def test_pictures_of_one_pair_count_as_one_where_they_agree() -> None:
    agree = np.repeat([[True], [False]] * 20, 8, axis=1)
    np.testing.assert_allclose(clustered_interval(agree), wilson_interval(0.5, 40), atol=0.02)
    apart = np.tile([[True, False] * 4], (40, 1))
    np.testing.assert_allclose(clustered_interval(apart), wilson_interval(0.5, 40), atol=1e-9)
    none = np.zeros((40, 8), bool)
    assert clustered_interval(none) == wilson_interval(0.0, 40)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_the_interval_holds_as_often_as_it_says(spread: float) -> None:
    """Of 400 samples of 60 pairs of 8 pictures, about 95 % of the intervals hold the true share."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        chances = np.clip(0.3 + spread * rng.choice([-1, 1], size=(60, 1)), 0, 1)
        low, high = clustered_interval(rng.random((60, 8)) < chances)
        held += low <= 0.3 <= high
    # Three standard deviations of a share of 0.95 among 400 are 3.3 %.
    assert held / 400 > 0.95 - 0.033


def test_a_run_is_measured_and_the_figures_are_kept(trained: TrainResult) -> None:
    result = evaluate_run(trained.run, num_seeds=2)
    assert (result.step, result.held_out_pairs, result.seeds) == (6, 5, 2)
    assert result.chance == 1 / 5
    assert result.retrieval_interval[0] <= result.retrieval <= result.retrieval_interval[1]
    assert result.samples == trained.samples
    assert result.pictures.is_file()
    kept = json.loads((trained.run / "evaluation.json").read_text())
    assert kept["held_out_loss"] == result.held_out_loss
    # The same losses as the training measured at its last step, with the same noise.
    (line,) = [line for line in read_lines(trained.run / "metrics.jsonl") if "held_out_loss" in line]
    np.testing.assert_allclose(
        (result.held_out_loss, result.unconditional_loss),
        (line["held_out_loss"], line["unconditional_loss"]),
        rtol=1e-5,
    )


def test_a_run_without_held_out_pairs_is_refused(trained: TrainResult) -> None:
    recipe = load_run(trained.run, ["data.split=all"]).recipe
    with pytest.raises(UsageError, match=r"holds no \(concept, style\) pairs out"):
        evaluate_run(Path(trained.run), recipe=recipe)


def test_other_styles_count_training_pictures_of_the_same_concept() -> None:
    """One of the two training pictures looks like its own concept's target, one like the other's."""
    held_out, training = pictures("demo-160", size=32, split="held_out"), pictures("demo-160", size=32, split="train")
    assert other_styles(held_out, held_out) == 1.0
    moved = dataclasses.replace(held_out, images=np.roll(held_out.images, 1, axis=0))
    assert other_styles(held_out, moved) == 0.0
    # 129 of the 186 training pictures of the 62 held-out concepts, counted by an independent script.
    assert other_styles(held_out, training) == pytest.approx(129 / 186)
