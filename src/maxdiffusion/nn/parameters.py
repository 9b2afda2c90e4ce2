"""Every parameter is declared with a logical name for each of its dimensions, and gathered where it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxdiffusion.runtime import Runtime

Initializer: TypeAlias = Callable[..., Array]
"""`(key, shape, dtype) -> array`."""


def uniform(fan_in: int, gain: float = 1.0) -> Initializer:
    """Uniform values of variance `gain**2 / fan_in` (LeCun et al. 1998), drawn in float32 and cast once.

    Uniform rather than normal: only products and sums make them, so that every mesh gives the same bits.
    """
    bound = gain * math.sqrt(3.0 / fan_in)

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return init


def zeros(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An initializer of zeros."""
    del key
    return jnp.zeros(shape, dtype)


def ones(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An initializer of ones."""
    del key
    return jnp.ones(shape, dtype)


def parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    runtime: Runtime,
    *,
    dtype: Any = None,
) -> Array:
    """The parameter `name` of `module`, ready for use in a product.

    It is made and stored in `runtime.weights_dtype`, cast, and then gathered over the axes that serve storage only
    (the cast comes first, so that a bfloat16 model moves half the bytes).

    Args:
        module: the layer, inside its compact method.
        name: the parameter's name in the layer.
        init: makes the initial values.
        shape: of the parameter.
        names: one logical axis a dimension; None for kernel height and width, and for pairs.
        runtime: how the model runs.
        dtype: of the result; None for `runtime.dtype`.
    """
    assert len(names) == len(shape), (name, names, shape)
    value: Any = module.param(name, nn.with_logical_partitioning(init, names), shape, runtime.weights_dtype)
    return runtime.layout.use(value.astype(dtype or runtime.dtype), *names)


def lead_axes(value: Array, ndim: int) -> Array:
    """`value` with leading axes of size 1, so that it meets an array of `ndim` dimensions without rank promotion."""
    return value.reshape((1,) * (ndim - value.ndim) + value.shape)
