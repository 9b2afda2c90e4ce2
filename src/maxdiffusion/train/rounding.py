"""Weights kept in bfloat16: rounded at random, so that a step too small for their eight bits moves them in the mean.

The bits are a function of (key, step, leaf, element): the same on every mesh.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int, Key, UInt16

from maxdiffusion.diffusion.noise import stream
from maxdiffusion.nn.random_bits import weights_key
from maxdiffusion.parallel.report import path_name

Rounding: TypeAlias = Literal["stochastic", "nearest"]


def stochastic(x: Float[Array, "*shape"], bits: UInt16[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """One of the two bfloat16 neighbours of each float32 number, the nearer the likelier: right in the mean.

    Args:
        x: float32.
        bits: random.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    upper = jax.lax.bitcast_convert_type((word >> 16).astype(jnp.uint16), jnp.bfloat16)
    # What is no number is carried over as it is: adding bits could make one of it.
    return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))


def stored(params: Any, like: Any, rounding: Rounding, *, key: Key[Array, ""], step: Int[Array, ""]) -> Any:
    """float32 weights in the dtype that they are kept in.

    Args:
        params: tree of float32 arrays.
        like: the same tree of what has the dtypes; float32 leaves stay as they are.
        rounding: of bfloat16 leaves.
        key: of the run.
        step: that made the weights.
    """
    at_step = weights_key(jax.random.fold_in(stream(key, "rounding"), step))

    def one(path: Any, leaf: Array, kept: Any) -> Array:
        if kept.dtype == leaf.dtype or rounding == "nearest":
            return leaf.astype(kept.dtype)
        name = jax.random.fold_in(at_step, zlib.crc32(path_name(path).encode()))
        return stochastic(leaf, jax.random.bits(name, leaf.shape, jnp.uint16))

    return jax.tree_util.tree_map_with_path(one, params, like)
