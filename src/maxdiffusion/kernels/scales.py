"""Values of few bits and the scales that they are multiplied with, by Qwix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
    for int4. Under a fixed calibration as well, what shares a scale with a NaN or an infinity becomes NaN: an integer
    would hide it.

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
    exact = x.astype(jnp.float32)
    how = {"channelwise_axes": tuple(kept), "tiled_axes": dict(groups), "calibration_method": calibration}
    made = qwix().quantize(exact, dtype, **how)
    if method == "fixed":  # Qwix gives one scale to all
        largest = qwix().quantize(exact, dtype, **how | {"calibration_method": "absmax"}).scale
        made = dataclasses.replace(made, scale=made.scale + 0 * largest)
    return made


def clipped(
    x: Float[Array, "..."], scale: Float[Array, "..."], dtype: Any, calibration: str
) -> Bool[Array, "..."] | None:
    """Where `quantised` clips; None for a calibration under which it never does.

    Args:
        x: what was quantised.
        scale: that it got, of a shape that `x` can be compared with.
        dtype: of the values.
        calibration: how scales were chosen.
    """
    method, _, factor = calibration.partition(",")
    if method == "absmax" and float(factor or 1) >= 1:
        return None
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = int(jnp.iinfo(dtype).max) + 0.5 if integers else float(jnp.finfo(dtype).max)
    return jnp.abs(x.astype(jnp.float32)) > largest * scale
