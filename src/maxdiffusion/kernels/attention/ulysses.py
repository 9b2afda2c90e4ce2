"""Ulysses attention: devices that share a sequence swap parts of it for heads, and swap back what comes out.

Jacobs et al. 2023. Before the swap a device has a part of the tokens and all heads, after it all tokens (of its group)
and a part of the heads. Where groups are smaller than the number of devices that share the sequence, what runs between
the swaps is a ring across the groups: the two-dimensional combination (Fang and Zhao 2024, unified sequence
parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from maxdiffusion.kernels.attention.local import Inputs

_LENGTH, _HEADS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which devices swap with one another.

    Attributes:
        axes: mesh axes of the sequence, outermost first; they are manual where the swap runs.
        devices: devices of `axes` together.
        degree: devices in a group, neighbours among them; it divides the heads of a device.
    """

    axes: tuple[str, ...]
    devices: int
    degree: int

    @property
    def index_groups(self) -> list[list[int]] | None:
        """The groups as lists of devices; None when all are one group."""
        if self.degree == self.devices:
            return None
        return [list(range(first, first + self.degree)) for first in range(0, self.devices, self.degree)]


def ulysses_attention(
    groups: Groups, attend: Callable[[Inputs], Float[Array, "B Lq H D"]], inputs: Inputs
) -> Float[Array, "B Lq H D"]:
    """Attention with four all-to-alls, of queries, keys, values and of the output; as many again backward.

    A mask of keys (a byte a token) is gathered within the group, in the order that its keys arrive in.

    Args:
        groups: who swaps with whom; runs inside `shard_map` over its axes.
        attend: attention with the tokens of the whole group and a part of the heads; differentiable.
        inputs: this device's equal part of the tokens, with all heads that it shares out.

    Returns:
        array of the shape and dtype of the queries.
    """
    q, k, v = (_swap(groups, x, split=_HEADS, join=_LENGTH) for x in inputs[:3])
    mask = inputs.mask
    if mask is not None:
        mask = jax.lax.all_gather(mask, groups.axes, axis=1, tiled=True, axis_index_groups=groups.index_groups)
    return _swap(groups, attend(Inputs(q, k, v, mask)), split=_LENGTH, join=_HEADS)


def _swap(groups: Groups, x: Array, *, split: int, join: int) -> Array:
    return jax.lax.all_to_all(x, groups.axes, split, join, tiled=True, axis_index_groups=groups.index_groups)
