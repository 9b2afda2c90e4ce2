"""Sample i's noise is the same bits in every batch, on every sharding, from every kind of key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.noise import noise, sample_keys, step_noise, stream

SHAPE = (5, 3)
_noise = jax.jit(noise, static_argnames=("shape", "dtype"))


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prefixes_subsets_and_order_of_a_batch(impl):
    key = jax.random.key(7, impl=impl)
    whole = bits(_noise(key, jnp.arange(8), SHAPE))
    for chosen in ([0], [0, 1, 2], [5], [7, 2, 2, 0]):
        np.testing.assert_array_equal(bits(_noise(key, jnp.array(chosen), SHAPE)), whole[chosen])
    np.testing.assert_array_equal(bits(noise(key, jnp.arange(8), SHAPE)), whole)  # not jitted


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bitwise_the_same_on_every_sharding(devices, impl):
    key = jax.random.key(7, impl=impl)
    whole = bits(_noise(key, jnp.arange(8), SHAPE))
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    for spec in (PartitionSpec("data"), PartitionSpec(("data", "model")), PartitionSpec("model"), PartitionSpec()):
        out = _noise(key, jax.device_put(jnp.arange(8), NamedSharding(mesh, spec)), SHAPE)
        np.testing.assert_array_equal(bits(out), whole)
    made = jax.jit(
        lambda: noise(key, jnp.arange(8), SHAPE), out_shardings=NamedSharding(mesh, PartitionSpec("data", None, None))
    )()
    assert made.addressable_shards[0].data.shape == (2, *SHAPE)
    np.testing.assert_array_equal(bits(made), whole)


def test_steps_samples_and_purposes_differ():
    key = jax.random.key(0)
    drawn = [
        noise(key, jnp.array([0]), (64,)),
        noise(key, jnp.array([1]), (64,)),
        noise(key, jnp.array([0]), (64,), step=1),
        noise(key, jnp.array([1]), (64,), step=1),
        noise(stream(key, "time"), jnp.array([0]), (64,)),
        noise(stream(key, "noise"), jnp.array([0]), (64,)),
        noise(jax.random.key(1), jnp.array([0]), (64,)),
    ]
    apart = np.corrcoef(np.concatenate(drawn)) - np.eye(len(drawn))
    assert np.max(np.abs(apart)) < 5 / np.sqrt(64)  # five standard errors of no correlation
    np.testing.assert_array_equal(jax.random.key_data(stream(key, "time")), jax.random.key_data(stream(key, "time")))


def test_step_noise_is_the_same_rule_and_may_be_traced():
    key, indices = jax.random.key(4), jnp.arange(3)
    fresh = step_noise(key, indices, SHAPE)
    for i in range(3):
        np.testing.assert_array_equal(bits(jax.jit(fresh)(jnp.int32(i))), bits(noise(key, indices, SHAPE, step=i + 1)))


def test_it_is_standard_normal():
    drawn = np.asarray(noise(jax.random.key(0), jnp.arange(1000), (100,)), np.float64)
    count = drawn.size
    assert abs(drawn.mean()) < 5 / np.sqrt(count)
    assert abs(drawn.var() - 1) < 5 * np.sqrt(2 / count)
    assert abs((drawn**4).mean() - 3) < 5 * np.sqrt(96 / count)


def test_bfloat16_is_float32_rounded():
    exact = noise(jax.random.key(0), jnp.arange(4), SHAPE)
    rough = noise(jax.random.key(0), jnp.arange(4), SHAPE, jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rough, exact.astype(jnp.bfloat16))


def test_keys_are_threefry_whatever_came_in():
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        keys = sample_keys(jax.random.key(1, impl=impl), jnp.arange(4))
        assert keys.shape == (4,) and jax.random.key_impl(keys) == "threefry2x32"
        assert np.unique(np.asarray(jax.random.key_data(keys)), axis=0).shape[0] == 4
