"""Values of few bits and the scales that they are multiplied with, by Qwix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def qwix() -> Any:
    """The package Qwix, imported where something is quantised: it takes a third of a second."""
    import qwix

    return qwix


def quantised(
    x: Float[Array, "..."],
    dtype: Any,
    kept: Sequence[int],
    calibration: str,
    groups: Mapping[int, int] = MappingProxyType({}),
) -> Any:
    """A `qwix.QArray` of `x` with a float32 scale for each index of the dimensions `kept`.

    Qwix maps the largest magnitude to 127.5, the border between two int8 values (-128 and -127): the last bit of a
    division would decide which of them it becomes, and differ between programs. Here it is mapped to 127, and to 7
    for int4.

    Args:
        x: any floating dtype.
        dtype: of the values.
        kept: dimensions of which each index has a scale of its own.
        calibration: how scales are chosen.
        groups: dimensions of which so many neighbours share one.
    """
    method, _, factor = calibration.partition(",")
    if method == "absmax" and jnp.issubdtype(dtype, jnp.integer):
        largest = int(jnp.iinfo(dtype).max)
        calibration = f"absmax,{float(factor or 1) * (largest + 0.5) / largest}"
    return qwix().quantize(
        x.astype(jnp.float32),
        dtype,
        channelwise_axes=tuple(kept),
        tiled_axes=dict(groups),
        calibration_method=calibration,
    )
