"""Where arrays live that belong to a weight: those of an optimizer, less the dimension that was averaged away, and the
values and scales of a weight that is stored quantised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding, Sharding

from maxdiffusion.parallel.layout import partition
from maxdiffusion.parallel.rules import axes_of

_AVERAGED = {"v_row": -1, "v_col": -2}
"""Of Adafactor's two (optax's `FactoredState`): the place of the dimension that each lacks, when sorted by size."""


def moment_sharding(
    field: str, shape: Sequence[int], *, weight: Sequence[int], sharding: NamedSharding
) -> NamedSharding | None:
    """The sharding of an optimizer's array that belongs to a weight; None where its shape does not say how.

    Args:
        field: name of the array within the optimizer's state.
        shape: of the array.
        weight: shape of the weight.
        sharding: of the weight.
    """
    shape, weight = tuple(shape), tuple(weight)
    if shape == weight:
        return sharding
    if field not in _AVERAGED or len(weight) < 2:
        return None
    lost = int(np.argsort(weight)[_AVERAGED[field]])
    if shape != weight[:lost] + weight[lost + 1 :]:
        return None
    axes = [axes_of(entry) for entry in sharding.spec] + [()] * (len(weight) - len(sharding.spec))
    return NamedSharding(sharding.mesh, partition(axes[:lost] + axes[lost + 1 :]))


def part_sharding(shape: Sequence[int], weight: Sequence[int], sharding: Sharding | None) -> Sharding | None:
    """The sharding of an array with the dimensions of a weight, some of them shorter.

    Args:
        shape: of the array.
        weight: shape of the weight.
        sharding: of the weight; one that has no mesh stays as it is.

    Returns:
        Each dimension is cut by the weight's mesh axes, the first ones as far as they divide it.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [axes_of(entry) for entry in sharding.spec] + [()] * (len(weight) - len(sharding.spec))
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True))
    cut = [
        tuple(axis for end, axis in enumerate(dim, 1) if size % math.prod(sizes[each] for each in dim[:end]) == 0)
        for size, dim in zip(shape, axes, strict=True)
    ]
    return NamedSharding(sharding.mesh, partition(cut))


def layer_sharding(sharding: Sharding | None, ndim: int) -> Sharding | None:
    """The sharding of a layer of a stack: that of the stack less its first dimension, of which each device has all.

    Args:
        sharding: of the stack; one that has no mesh stays as it is.
        ndim: number of the stack's dimensions.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [axes_of(entry) for entry in sharding.spec] + [()] * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, partition(axes[1:]))


def stack_sharding(sharding: Sharding | None) -> Sharding | None:
    """The sharding of a stack of which every device holds a part of each layer."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, partition([(), *(axes_of(entry) for entry in sharding.spec)]))
