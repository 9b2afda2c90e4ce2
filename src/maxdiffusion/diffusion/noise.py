"""Noise is a function of (key, step, global sample index): never of the batch size, the mesh or the host.

Every sample has its own key, so sample i of a batch is sample i alone, bit for bit, however the batch is cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

_IMPL = "threefry2x32"  # counter based, so a vmap over keys gives each key its own bits (`rbg` does not promise that)


def stream(key: Key[Array, ""], purpose: str) -> Key[Array, ""]:
    """An independent key for a named purpose, such as "time" or "dropout"; a name gives the same key everywhere."""
    return jax.random.fold_in(_threefry(key), zlib.crc32(purpose.encode()))


def sample_keys(
    key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
) -> Key[Array, " batch"]:
    """One key for each sample.

    Args:
        key: the run's key, of any implementation; the result is threefry.
        indices: global index of each sample, not negative.
        step: number of the step, static or traced.

    Returns:
        Keys, shape (batch,).
    """
    at_step = jax.random.fold_in(_threefry(key), step)
    return jax.vmap(partial(jax.random.fold_in, at_step))(indices)


def noise(
    key: Key[Array, ""],
    indices: Int[Array, " batch"],
    shape: tuple[int, ...],
    dtype: jnp.dtype | type = jnp.float32,
    *,
    step: int | Int[Array, ""] = 0,
) -> Float[Array, "batch ..."]:
    """Standard normal noise for each sample.

    Args:
        key: the run's key.
        indices: global index of each sample; the result is sharded as it is.
        shape: shape of one sample, without the batch.
        dtype: drawn in float32 and rounded to this.
        step: 0 for the first noise of sampling, i + 1 for the solver's step i, or the step of training.

    Returns:
        Shape (batch, *shape).
    """
    draw = jax.vmap(lambda one: jax.random.normal(one, shape, jnp.float32))
    return draw(sample_keys(key, indices, step=step)).astype(dtype)


def step_noise(
    key: Key[Array, ""], indices: Int[Array, " batch"], shape: tuple[int, ...]
) -> Callable[[Int[Array, ""]], Float[Array, "batch ..."]]:
    """The noise of stochastic solvers as a function of the step number i, float32: what `sample` takes as `noise`.

    With the same key as the initial `noise(key, indices, shape)` it is independent of that (i counts from step 1).
    """
    return lambda index: noise(key, indices, shape, step=index + 1)


def _threefry(key: Key[Array, ""]) -> Key[Array, ""]:
    if jax.random.key_impl(key) == _IMPL:
        return key
    words = jax.random.key_data(key).reshape(-1)
    made = jax.random.wrap_key_data(jnp.resize(words[:2], (2,)), impl=_IMPL)
    for i in range(2, words.shape[0]):
        made = jax.random.fold_in(made, words[i])
    return made
