"""A source is a captioned picture at every index: what every data set here offers and what batches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One captioned picture.

    Attributes:
        image: RGB, uint8, `(height, width, 3)`.
        caption: what the picture shows.
        key: a name that is unique in its source and stays the same from run to run.
    """

    image: UInt8[np.ndarray, "height width 3"]
    caption: str
    key: str


@runtime_checkable
class Source(Protocol):
    """Random access to samples, all of one picture size or sorted into buckets of one size each.

    Access is free of side effects, so any thread may use it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def to_float(pixels: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Pixels 0..255 as the float32 in [-1, 1] that models are trained on."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


def to_pixels(values: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """The inverse of `to_float`: values outside [-1, 1] are clipped, the rest is rounded to the nearest of 0..255."""
    return np.rint((np.clip(values, -1, 1).astype(np.float32) + np.float32(1)) * np.float32(127.5)).astype(np.uint8)
