"""Figures are what they say: nearest targets, distances of distributions, and intervals that hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg

from maxdiffusion.data.pictures import Pictures, pictures
from maxdiffusion.pipelines.picture_features import Seen
from maxdiffusion.train.likeness import (
    clustered_interval,
    frechet_distance,
    nearest_is_own,
    other_styles,
    wilson_interval,
)


def _directions(number: int) -> np.ndarray:
    """So many features of length 1, all different."""
    vectors = np.random.default_rng(0).standard_normal((number, 128))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_the_nearest_target_is_found() -> None:
    targets = _directions(5)
    right = nearest_is_own(np.stack([targets, targets[::-1]], axis=1), targets)
    assert right[:, 0].all()
    assert right[:, 1].tolist() == [False, False, True, False, False]


def test_a_tie_is_not_right() -> None:
    targets = _directions(3)
    targets[1] = targets[0]
    assert nearest_is_own(targets[:, None], targets)[:, 0].tolist() == [False, False, True]


def test_other_styles_count_training_pictures_of_the_same_concept() -> None:
    """Training pictures with the features of their concept's target are all right, moved by one target all wrong."""
    held_out, training = pictures("demo-160", size=4, split="held_out"), pictures("demo-160", size=4, split="train")
    features = _directions(len(held_out))
    row = {concept: index for index, concept in enumerate(held_out.concepts)}

    def share(move: int, training: Pictures) -> float:
        rows = [(row.get(concept, 0) + move) % len(held_out) for concept in training.concepts]
        return other_styles(held_out, _seen(features), training, _seen(features[rows]))

    assert share(0, training) == 1.0
    assert share(1, training) == 0.0
    others = [index for index, concept in enumerate(training.concepts) if concept not in row]
    unknown = dataclasses.replace(training, concepts=tuple(training.concepts[index] for index in others))
    assert math.isnan(share(0, unknown))


def _seen(features: np.ndarray) -> Seen:
    return Seen(features=features, concepts=np.zeros(len(features), int))


def test_the_frechet_distance_is_that_of_the_formula() -> None:
    """Against the matrix square root of scipy, which goes another way; both are float64."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((200, 6)) @ rng.standard_normal((6, 6))
    b = rng.standard_normal((150, 6)) @ rng.standard_normal((6, 6)) + 1
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    means = np.square(a.mean(axis=0) - b.mean(axis=0)).sum()
    wanted = means + np.trace(cov_a + cov_b - 2 * np.real(scipy.linalg.sqrtm(cov_a @ cov_b)))
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)


def test_the_frechet_distance_of_known_normals() -> None:
    """Equal sets are 0 apart; moved by m they are |m|^2 apart; fewer pictures than features are no error."""
    a = _directions(40)
    # Square roots of eigenvalues that are zero but for rounding (1e-17) are 1e-9 each.
    assert abs(frechet_distance(a, a)) < 1e-6
    assert frechet_distance(a, a + 0.5) == pytest.approx(128 * 0.25, rel=1e-6)
    assert math.isnan(frechet_distance(a[:1], a))


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
