"""Moves between devices that are counted along several mesh axes in the order in which a rule names them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Shaped


def permute(x: Shaped[Array, "..."], axes: Sequence[str], hops: Sequence[tuple[int, int]]) -> Shaped[Array, "..."]:
    """`jax.lax.ppermute` by places in the order of `axes`; runs inside `shard_map` over them.

    jax counts the devices of a permute in the order of the mesh, whatever the order of the axes, while an array that is
    cut over `("tensor", "context")` lies in the order of the rule.

    Args:
        x: this device's part.
        axes: mesh axes, outermost first.
        hops: pairs of places, from and to; where nothing arrives are zeros.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ordered = sorted(axes, key=mesh.axis_names.index)
    sizes = [mesh.shape[axis] for axis in axes]
    places = np.arange(np.prod(sizes)).reshape(sizes).transpose([list(axes).index(axis) for axis in ordered])
    of_jax = np.argsort(places.reshape(-1))
    return jax.lax.ppermute(x, tuple(ordered), [(int(of_jax[a]), int(of_jax[b])) for a, b in hops])
