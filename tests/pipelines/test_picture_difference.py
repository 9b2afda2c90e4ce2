"""Differences of pictures are those of their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maxdiffusion.pipelines.picture_difference import picture_difference, psnr, ssim


def _pictures(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)


def test_equal_pictures_have_no_difference() -> None:
    pictures = _pictures()
    found = picture_difference(pictures, pictures)
    assert (found.psnr, found.ssim) == (math.inf, pytest.approx(1))
    assert found.features <= 1e-6  # lengths of float32 features are 1 to rounding


def test_psnr_is_that_of_the_mean_square_over_all_pictures() -> None:
    wanted = np.full((2, 4, 4, 3), 100, np.uint8)
    pictures = wanted + np.array([0, 10], np.uint8).reshape(2, 1, 1, 1)
    assert psnr(pictures, wanted) == pytest.approx(10 * math.log10(255**2 / 50))


def test_ssim_of_flat_pictures_is_that_of_their_means() -> None:
    """Without any variance the formula is (2 a b + c) / (a^2 + b^2 + c)."""
    a, b, c = 50.0, 150.0, (0.01 * 255) ** 2
    flat = [np.full((1, 16, 16, 3), value, np.uint8) for value in (a, b)]
    assert ssim(*flat) == pytest.approx((2 * a * b + c) / (a * a + b * b + c))


def test_ssim_of_a_window_is_that_of_its_weighted_moments() -> None:
    """A picture of 11 x 11 pixels has one place: the formula with moments taken by hand."""
    x, y = (_pictures(seed)[:1, :11, :11, :1].astype(np.float64) for seed in (0, 1))
    axis = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = np.outer(axis, axis)[None, :, :, None] / axis.sum() ** 2
    mean = [(weights * one).sum() for one in (x, y)]
    var = [(weights * (one - m) ** 2).sum() for one, m in zip((x, y), mean, strict=True)]
    both = (weights * (x - mean[0]) * (y - mean[1])).sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    wanted = (2 * mean[0] * mean[1] + c1) * (2 * both + c2)
    wanted /= (mean[0] ** 2 + mean[1] ** 2 + c1) * (sum(var) + c2)
    assert ssim(x.astype(np.uint8), y.astype(np.uint8)) == pytest.approx(wanted)
    assert ssim(_pictures(0), _pictures(0) // 2 * 2) > ssim(_pictures(0), _pictures(0) // 16 * 16)
