"""Kernels stored quantised: values of 8 or 4 bits with their scales, in the place of the array that they stand for.

A kernel of int8 or float8 has a float32 scale for each output channel, as in a product of quantised operands. One of
int4 has a bfloat16 scale for each output channel and each group of inputs; two of its values share a byte, which no
backend need know about (jax's own int4 takes a whole byte on CPUs).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from maxdiffusion.kernels.scales import clipped, quantised
from maxdiffusion.specs import StoredAs

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.uint8}
"""What values are kept in, by how a kernel is stored."""

GROUP = 32
"""Inputs that share a scale of int4, at least: 4 bits each and 16 for all make 0.28 of bfloat16's bytes."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["packed"])
@dataclass(frozen=True, kw_only=True)
class Stored:
    """A kernel stored quantised; a pytree, so that it is scanned, cut and moved as the array would be.

    Attributes:
        qvalue: of the kernel's shape; two values share a byte where they are packed.
        scale: with as many dimensions, each of a size that divides the kernel's.
        packed: dimension along which values are packed, counted from the end; None where each has a byte.
    """

    qvalue: Any
    scale: Any
    packed: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel."""
        shape = list(self.qvalue.shape)
        if self.packed is not None:
            shape[self.packed] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of its dimensions."""
        return len(self.qvalue.shape)

    @property
    def dtype(self) -> Any:
        """Of the values as they are kept."""
        return self.qvalue.dtype

    @property
    def nbytes(self) -> int:
        """Size of its buffers, scales included."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in (self.qvalue, self.scale))

    def parts(self, change: Callable[[Any], Any]) -> Stored:
        """The same with both parts changed."""
        return dataclasses.replace(self, qvalue=change(self.qvalue), scale=change(self.scale))

    def whole(self, dtype: Any) -> Float[Array, "..."]:
        """The kernel that it stands for."""
        values = self.qvalue if self.packed is None else unpacked(self.qvalue, self.packed)
        return (values.astype(jnp.float32) * self.scale_of_each).astype(dtype)

    @property
    def scale_of_each(self) -> Float[Array, "..."]:
        """The float32 scale of each value, with size 1 where all along a dimension share one."""
        scale = self.scale.astype(jnp.float32)
        for axis, size in enumerate(self.shape):
            if scale.shape[axis] not in (1, size):  # the dimension is cut into groups
                scale = jnp.repeat(scale, size // scale.shape[axis], axis)
        return scale


def is_stored(leaf: object) -> bool:
    """Whether a leaf of a tree of weights is stored quantised."""
    return isinstance(leaf, Stored)


def group_size(inputs: int) -> int:
    """How many neighbouring inputs share a scale of int4: the smallest divisor from `GROUP` on, or all of fewer."""
    return next((size for size in range(GROUP, inputs) if inputs % size == 0), inputs)


def kept_as(wanted: StoredAs, shape: tuple[int, ...], features: int) -> StoredAs:
    """How a kernel of this shape is stored: int4 needs an even number of inputs, others become int8.

    Args:
        wanted: how kernels are to be stored.
        shape: of the kernel.
        features: number of its dimensions behind the inputs.
    """
    return "int8" if wanted == "int4" and shape[len(shape) - features - 1] % 2 else wanted


def stored(
    kernel: Float[Array, "..."], wanted: StoredAs, *, inputs: int, features: int, calibration: str = "absmax"
) -> Stored:
    """A kernel as it is stored.

    Args:
        kernel: (*stacked, *inputs, *features), any floating dtype; each stacked one has scales of its own.
        wanted: how; see `kept_as`.
        inputs: number of dimensions that a product sums over.
        features: number of dimensions behind them.
        calibration: of the scales.
    """
    how = kept_as(wanted, kernel.shape, features)
    lead = kernel.ndim - inputs - features
    kept = (*range(lead), *range(kernel.ndim - features, kernel.ndim))
    if how != "int4":
        made = quantised(kernel, DTYPES[how], kept, calibration)
        return Stored(qvalue=made.qvalue, scale=made.scale)
    grouped = kernel.ndim - features - 1
    kept = tuple(axis for axis in range(kernel.ndim) if axis != grouped)
    made = quantised(kernel, jnp.int4, kept, calibration, groups={grouped: group_size(kernel.shape[grouped])})
    packed_axis = grouped - kernel.ndim
    return Stored(
        qvalue=packed(made.qvalue.astype(jnp.int8), packed_axis),
        scale=made.scale.astype(jnp.bfloat16),
        packed=packed_axis,
    )


def packed(values: Int[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Neighbouring pairs of values from -8 to 7 along a dimension, in a byte each: the first in the lower half.

    Neighbours, so that a cut of the dimension over devices cuts bytes as it cut values.
    """
    axis %= values.ndim
    pairs = values.reshape(*values.shape[:axis], -1, 2, *values.shape[axis + 1 :]).astype(jnp.uint8)
    low, high = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in (0, 1))
    return (low & 0xF) | (high << 4)


def unpacked(values: UInt8[Array, "..."], axis: int) -> Int[Array, "..."]:
    """What `packed` was given, as int8."""
    axis %= values.ndim
    signed = values.astype(jnp.int8)
    halves = [jnp.right_shift(jnp.left_shift(signed, 4), 4), jnp.right_shift(signed, 4)]
    pairs = jnp.stack(halves, axis=axis + 1)
    return pairs.reshape(*values.shape[:axis], -1, *values.shape[axis + 1 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def rounded(kernel: Float[Array, "..."], inputs: int, calibration: str, wanted: StoredAs) -> Float[Array, "..."]:
    """A kernel as it would be after it was stored and read; gradients pass straight through, and stop where it clips.

    Args:
        kernel: (*inputs, *features), any floating dtype.
        inputs: number of dimensions that a product sums over.
        calibration: of the scales.
        wanted: how it would be stored; `int8` or `int4`.
    """
    kept = stored(kernel, wanted, inputs=inputs, features=kernel.ndim - inputs, calibration=calibration)
    return kept.whole(kernel.dtype)


def _rounded(kernel: Array, inputs: int, calibration: str, wanted: StoredAs) -> tuple[Array, Array]:
    return rounded(kernel, inputs, calibration, wanted), kernel


def _rounded_gradient(inputs: int, calibration: str, wanted: StoredAs, kernel: Array, g: Array) -> tuple[Array]:
    kept = stored(kernel, wanted, inputs=inputs, features=kernel.ndim - inputs, calibration=calibration)
    beyond = clipped(kernel, kept.scale_of_each, jnp.int8 if kept.packed is None else jnp.int4, calibration)
    return (g if beyond is None else jnp.where(beyond, 0, g),)


rounded.defvjp(_rounded, _rounded_gradient)
