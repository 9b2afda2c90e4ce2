"""How far pictures are from others: PSNR, SSIM, and the distance of what the shipped classifier sees in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from maxdiffusion.pipelines.picture_features import look

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
"""Constants of Wang et al. 2004."""


@dataclass(frozen=True, kw_only=True)
class PictureDifference:
    """How far pictures are from others of the same order.

    Attributes:
        psnr: peak signal-to-noise ratio in dB over all pictures together; infinite for equal ones.
        ssim: mean structural similarity; 1 for equal ones.
        features: mean of 1 - cosine of the features of the shipped classifier, 0 for equal ones.
    """

    psnr: float
    ssim: float
    features: float


def picture_difference(
    pictures: UInt8[np.ndarray, "pictures height width 3"], wanted: UInt8[np.ndarray, "pictures height width 3"]
) -> PictureDifference:
    """Compares pictures one by one."""
    seen, there = look(pictures).features, look(wanted).features
    return PictureDifference(
        psnr=psnr(pictures, wanted),
        ssim=ssim(pictures, wanted),
        features=max(0.0, float(np.mean(1 - np.sum(seen.astype(np.float64) * there, axis=1)))),
    )


def psnr(pictures: UInt8[np.ndarray, "..."], wanted: UInt8[np.ndarray, "..."]) -> float:
    """`10 log10(255^2 / mean squared difference)`, the mean over everything."""
    error = np.mean((pictures.astype(np.float64) - wanted) ** 2)
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(
    pictures: UInt8[np.ndarray, "pictures height width channels"],
    wanted: UInt8[np.ndarray, "pictures height width channels"],
) -> float:
    """Structural similarity (Wang et al. 2004), the mean over pictures, channels and places.

    Moments are weighted by a Gaussian of 11 x 11 pixels with a standard deviation of 1.5; no place whose window leaves
    the picture counts. Smaller pictures have a window of their own size.
    """
    x, y = pictures.astype(np.float64), wanted.astype(np.float64)
    mean_x, mean_y = _weighted(x), _weighted(y)
    var_x, var_y = _weighted(x * x) - mean_x**2, _weighted(y * y) - mean_y**2
    both = _weighted(x * y) - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + _C1) * (2 * both + _C2)
    return float(np.mean(likeness / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))))


def _weighted(x: Float[np.ndarray, "pictures height width channels"]) -> Float[np.ndarray, "pictures h w channels"]:
    for axis in (1, 2):
        size = min(_WINDOW, x.shape[axis])
        weights = np.exp(-((np.arange(size) - (size - 1) / 2) ** 2) / (2 * _SIGMA**2))
        windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=axis)
        x = windows @ (weights / weights.sum())
    return x
