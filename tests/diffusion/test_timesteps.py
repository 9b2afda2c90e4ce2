"""Time samplers have their distributions, and give sample i the same time in every batch and on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.timesteps import (
    TIME_SAMPLERS,
    Biased,
    Cosine,
    Equidistant,
    LogitNormal,
    Uniform,
    get_time_sampler,
)
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


def _biased(begin, end, multiplier):
    """The distribution function of a density that is `multiplier` times as high between `begin` and `end`."""
    whole = 1 + (multiplier - 1) * (end - begin)
    return lambda u: (u + (multiplier - 1) * np.clip(u - begin, 0, end - begin)) / whole


@pytest.mark.parametrize(
    ("sampler", "cdf"),
    [
        (Cosine(), lambda u: 2 / np.pi * np.arctan2(u, 1 - u)),
        (TIME_SAMPLERS["earlier"], _biased(0.0, 0.25, 2.0)),
        (TIME_SAMPLERS["later"], _biased(0.75, 1.0, 2.0)),
        (Biased(begin=0.2, end=0.6, multiplier=5.0), _biased(0.2, 0.6, 5.0)),
        (Biased(begin=0.2, end=0.6, multiplier=0.25), _biased(0.2, 0.6, 0.25)),
        (Biased(begin=0.0, end=1.0, multiplier=3.0), lambda u: u),
    ],
)
def test_closed_forms_of_uneven_times(sampler, cdf):
    count = 4000
    u = sampler(jax.random.key(1), jnp.arange(count))
    assert distance(u, cdf) < 2 / np.sqrt(count)  # exceeded once in 1500 draws of this many
    # And the bound tells them from uniform times, but for the last one.
    if cdf(0.25) != 0.25 or cdf(0.6) != 0.6:
        assert distance(u, lambda u: u) > 2 / np.sqrt(count)


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
    for wrong in ({"begin": 0.5, "end": 0.5}, {"end": 1.5}, {"begin": -0.1}):
        with pytest.raises(UsageError, match="0 <= begin < end <= 1"):
            Biased(**wrong)
    with pytest.raises(UsageError, match="above 0"):
        Biased(multiplier=0.0)


def test_equidistant_times_are_one_a_step():
    draw = Equidistant(number=8)
    times = [np.asarray(draw(jax.random.key(0), jnp.arange(3), step=step)) for step in range(9)]
    np.testing.assert_array_equal(np.stack(times), np.repeat(np.arange(9)[:, None] % 8 / 8, 3, axis=1))
    with pytest.raises(UsageError, match="write 1 time or more"):
        Equidistant(number=0)
