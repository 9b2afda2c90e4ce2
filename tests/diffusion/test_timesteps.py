"""Time samplers have their distributions, and give sample i the same time in every batch and on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.timesteps import TIME_SAMPLERS, LogitNormal, Uniform, get_time_sampler
from maxdiffusion.errors import UsageError


@pytest.mark.parametrize("name", sorted(TIME_SAMPLERS))
def test_a_function_of_key_and_index(name):
    draw = get_time_sampler(name)
    key = jax.random.key(3)
    whole = np.asarray(draw(key, jnp.arange(16)))
    assert whole.dtype == np.float32 and whole.shape == (16,)
    assert np.all((whole >= 0) & (whole < 1)) and np.unique(whole).size == 16
    np.testing.assert_array_equal(draw(key, jnp.array([9, 2])), whole[[9, 2]])
    assert not np.any(np.asarray(draw(key, jnp.arange(16), step=1)) == whole)
    assert not np.any(np.asarray(draw(jax.random.key(4), jnp.arange(16))) == whole)


@pytest.mark.parametrize("name", sorted(TIME_SAMPLERS))
def test_the_same_on_every_sharding(devices, name):
    draw = jax.jit(get_time_sampler(name))
    whole = draw(jax.random.key(3), jnp.arange(16))
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    for spec in (PartitionSpec("data"), PartitionSpec(("data", "model"))):
        indices = jax.device_put(jnp.arange(16), NamedSharding(mesh, spec))
        np.testing.assert_array_equal(draw(jax.random.key(3), indices), whole)


def distance(values, cdf) -> float:
    """Kolmogorov and Smirnov's distance."""
    values = np.sort(np.asarray(values, np.float64))
    return float(np.max(np.abs(cdf(values) - (np.arange(values.size) + 0.5) / values.size)))


def test_distributions():
    count, key = 4000, jax.random.key(0)
    bound = 2 / np.sqrt(count)  # exceeded once in 1500 draws of this many
    assert distance(Uniform()(key, jnp.arange(count)), lambda u: u) < bound
    # An additive sequence with the golden ratio has discrepancy below about log(n) / n.
    assert distance(Uniform(draw="stratified")(key, jnp.arange(count)), lambda u: u) < np.log(count) / count
    u = np.asarray(LogitNormal(mean=0.5, std=0.8)(key, jnp.arange(count)), np.float64)
    normal = (np.log(u / (1 - u)) - 0.5) / 0.8
    assert abs(normal.mean()) < 5 / np.sqrt(count)
    assert abs(normal.std() - 1) < 5 / np.sqrt(2 * count)


def test_stratified_batches_are_even_wherever_they_start():
    for first in (0, 123_456, 2_000_000_000):
        u = Uniform(draw="stratified")(jax.random.key(0), jnp.arange(32) + first)
        counts = np.histogram(np.asarray(u), bins=8, range=(0, 1))[0]
        assert counts.min() >= 3 and counts.max() <= 5  # 4 each, against a spread of 1.9 when independent


def test_extreme_logits_stay_below_one():
    u = LogitNormal(mean=50.0)(jax.random.key(0), jnp.arange(8))
    assert np.all(np.asarray(u) < 1)


def test_what_is_refused():
    with pytest.raises(UsageError, match="did you mean 'logit_normal'"):
        get_time_sampler("logitnormal")
    with pytest.raises(UsageError, match="did you mean 'stratified'"):
        Uniform(draw="stratify")
    for wrong in ({"std": 0.0}, {"mean": float("nan")}):
        with pytest.raises(UsageError, match="positive std"):
            LogitNormal(**wrong)
