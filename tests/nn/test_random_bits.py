"""The generator of initial weights: uniform, independent between keys, the same bits however it is sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.nn.random_bits import weights_key

NUM = 1 << 18
# Each statistic below is divided by its standard deviation under true randomness; 5 of them happen once in 2 million.
SIGMAS = 5.0


def uniforms(*path: int) -> np.ndarray:
    key = weights_key(jax.random.key(0))
    for word in path:
        key = jax.random.fold_in(key, word)
    return np.asarray(jax.random.uniform(key, (NUM,)), np.float64)


def test_values_fill_the_bins_evenly() -> None:
    counts = np.histogram(uniforms(1, 2), 256, (0, 1))[0]
    chi_squared = ((counts - NUM / 256) ** 2 / (NUM / 256)).sum()
    assert abs(chi_squared - 255) < SIGMAS * np.sqrt(2 * 255)


@pytest.mark.parametrize("other", [(1, 3), (2, 2), (2, 1), (1,)])
def test_keys_of_other_paths_are_independent(other: tuple[int, ...]) -> None:
    a, b = uniforms(1, 2) - 0.5, uniforms(*other) - 0.5
    assert abs((a * b).mean()) * 12 * np.sqrt(NUM) < SIGMAS


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbours_are_independent(lag: int) -> None:
    a = uniforms(5) - 0.5
    assert abs((a[lag:] * a[:-lag]).mean()) * 12 * np.sqrt(NUM - lag) < SIGMAS


def test_every_bit_is_fair() -> None:
    words = np.asarray(jax.random.bits(weights_key(jax.random.key(3)), (NUM,), jnp.uint32))
    ones = ((words[:, None] >> np.arange(32, dtype=np.uint32)[None]) & 1).mean(axis=0)
    assert (np.abs(ones - 0.5) * 2 * np.sqrt(NUM)).max() < SIGMAS


def test_split_keys_differ_from_each_other_and_from_folded_ones() -> None:
    key = weights_key(jax.random.key(0))
    words = {tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in jax.random.split(key, 64)}
    assert len(words) == 64


def test_the_key_follows_the_users_key() -> None:
    data = [jax.random.key_data(weights_key(jax.random.key(seed))).tolist() for seed in (0, 0, 1)]
    assert data[0] == data[1] != data[2]


def test_bits_do_not_depend_on_the_sharding(devices: np.ndarray) -> None:
    mesh = Mesh(devices.reshape(4, 2), ("a", "b"))

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, (16, 6, 8), jnp.uint32)

    key = weights_key(jax.random.key(0))
    whole = np.asarray(jax.jit(draw)(key))
    for spec in (P("a", None, "b"), P(("b", "a")), P(None, "b", "a")):
        sharded = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(jax.device_put(key, NamedSharding(mesh, P())))
        assert sharded.sharding.spec == spec
        np.testing.assert_array_equal(np.asarray(sharded), whole)
