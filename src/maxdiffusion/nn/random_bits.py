"""A counter-based generator for initial weights: each element hashes its own index, so any mesh gives the same bits.

`jax.random`'s threefry is also independent of the mesh, but dear to compile and to run on a CPU, one program for each
shape of a parameter: the initial weights of the full Stable Diffusion 1.5 took 98 s with it and 10 s with this, of its
tiny twin 15 s and 3 s (two cores, eight virtual devices). `rbg` keys are faster still, but not the same on every mesh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: neighbouring indices land far apart


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32-bit words in which each input bit moves every output bit (Wellons 2018, `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _derive(key: UInt32[Array, "2"], word: Any) -> UInt32[Array, "2"]:
    """The key that belongs to `word` under `key`."""
    mixed = _mix(key + jnp.asarray(word).astype(jnp.uint32).reshape(1) * jnp.uint32(_GOLDEN))
    return _mix(mixed ^ key[::-1])


def _seed(seed: Any) -> UInt32[Array, "2"]:
    word = jnp.asarray(seed).astype(jnp.uint32)
    return _derive(jnp.stack([word, ~word]), word)


def _index(shape: tuple[int, ...], offset: int = 0) -> UInt32[Array, "*shape"]:
    """The row-major index of each element; dimension by dimension, so that a sharded array makes its own part."""
    index, stride = jnp.full(shape, offset, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return index


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "*shape 2"]:
    index = _index(shape).reshape(-1)
    return jax.vmap(lambda word: _derive(key, word))(index).reshape(*shape, 2)


def _bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> Array:
    def words(salt: int) -> Array:
        index = _index(shape)
        return _mix(_mix(index * jnp.uint32(_GOLDEN) + key[0]) ^ (key[1] + jnp.uint32(salt)))

    if bit_width == 64:
        return words(0).astype(jnp.uint64) << 32 | words(_GOLDEN).astype(jnp.uint64)
    return words(0).astype(jnp.dtype(f"uint{bit_width}"))


_IMPLEMENTATION = jax.extend.random.define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_bits, fold_in=_derive, name="index_hash", tag="ihash"
)


def weights_key(rng: Array) -> Array:
    """A key of this generator drawn from a key of any other.

    Args:
        rng: a key of `jax.random.key` or `jax.random.PRNGKey`.

    Returns:
        A key that all of `jax.random` takes. For weights, not for the noise of training or sampling.
    """
    return jax.random.wrap_key_data(jax.random.bits(rng, (2,), jnp.uint32), impl=_IMPLEMENTATION)
