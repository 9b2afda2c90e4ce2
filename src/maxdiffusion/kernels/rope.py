"""Rotary position embedding: pairs of channels turned by the token's position times a frequency.

Source: Su et al. 2021 (RoFormer); several axes share the channels of a head, as in Heo et al. 2024. Phases, sines and
cosines are float32 whatever the arrays are: in bfloat16 positions beyond 256 fall together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Num


class Rotation(NamedTuple):
    """Cosine and sine of every token's angle for each pair of channels."""

    cos: Float32[Array, "*batch length pairs"]
    sin: Float32[Array, "*batch length pairs"]


def rotation(ids: Num[Array, "*batch length axes"], dims: Sequence[int], *, theta: float = 10_000.0) -> Rotation:
    """The rotation of tokens at these positions.

    The frequencies of an axis are `theta ** (-2 i / dim)`, made in float64 on the host.

    Args:
        ids: position of each token along each axis, of any numeric dtype.
        dims: channels of a head that each axis turns, even numbers.
        theta: longest period over 2 pi, nearly.

    Returns:
        float32, with `sum(dims) // 2` pairs.
    """
    assert ids.shape[-1] == len(dims), (ids.shape, dims)
    assert all(dim % 2 == 0 for dim in dims), dims
    positions = ids.astype(jnp.float32)
    phases = []
    for axis, dim in enumerate(dims):
        frequencies = (theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)
        phases.append(positions[..., axis : axis + 1] * frequencies.reshape((1,) * (ids.ndim - 1) + (-1,)))
    angles = jnp.concatenate(phases, axis=-1)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "B L H D"], by: Rotation) -> Float[Array, "B L H D"]:
    """Every head of `x` with its pairs of neighbouring channels turned.

    Args:
        x: queries or keys, any floating dtype.
        by: of shape (B or 1, L, D / 2).

    Returns:
        array of the shape and dtype of x; the products are float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
