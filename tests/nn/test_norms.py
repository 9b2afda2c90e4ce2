"""Norms against float64, also where the variance is small beside the mean, and in bfloat16."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.nn.norms import GroupNorm, LayerNorm, RMSNorm
from maxdiffusion.runtime import Runtime

SHAPE = (2, 5, 3, 12)


def expected(x: np.ndarray, groups: int | None, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if groups is None:
        y, axes = x, (3,)
    else:
        y, axes = x.reshape(*SHAPE[:3], groups, SHAPE[3] // groups), (1, 2, 4)
    y = (y - y.mean(axes, keepdims=True)) / np.sqrt(y.var(axes, keepdims=True) + 1e-5)
    return y.reshape(SHAPE) * scale + bias


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_norm_matches_float64(groups: int | None, mean: float) -> None:
    runtime = Runtime()
    layer = LayerNorm(runtime=runtime) if groups is None else GroupNorm(num_groups=groups, runtime=runtime)
    x = mean + jax.random.normal(jax.random.key(1), SHAPE)
    scale, bias = np.linspace(0.5, 2, 12), np.linspace(-1, 1, 12)
    params = {"params": {"scale": jnp.asarray(scale, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}}
    # The mean in float32 is off by a rounding of its size, which the variance of 1 does not shrink.
    tolerance = 1e-5 + 4 * mean * np.finfo(np.float32).eps
    np.testing.assert_allclose(
        layer.apply(params, x), expected(np.asarray(x), groups, scale, bias), rtol=1e-5, atol=tolerance
    )


def test_statistics_are_float32_in_a_bfloat16_model() -> None:
    layer = GroupNorm(num_groups=4, runtime=Runtime(dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16))
    x = (100 + jax.random.normal(jax.random.key(1), SHAPE)).astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        params = nn.unbox(layer.init(jax.random.key(0), x))
        y = layer.apply(params, x)
    assert y.dtype == jnp.bfloat16
    exact = expected(np.asarray(x, np.float64), 4, np.ones(12), np.zeros(12))
    # One rounding to 8 bits at the end; bfloat16 statistics at mean 100 would be off by 0.5.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-3)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(UsageError, match="norm_num_groups=5 does not divide 12"):
        GroupNorm(num_groups=5, runtime=Runtime()).init(jax.random.key(0), jnp.ones(SHAPE))


def test_rms_norm_matches_float64_in_a_bfloat16_model() -> None:
    layer = RMSNorm(runtime=Runtime(dtype=jnp.bfloat16))
    x = (100 + jax.random.normal(jax.random.key(1), SHAPE)).astype(jnp.bfloat16)
    scale = np.linspace(0.5, 2, 12)
    with jax.numpy_dtype_promotion("strict"):
        y = layer.apply({"params": {"scale": jnp.asarray(scale, jnp.float32)}}, x)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale
    # One rounding to 8 bits at the end.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)


def test_padding_rows_count_for_nothing() -> None:
    """Three rows of five, the others far off: the numbers of the three alone, and no gradient of the rest."""
    x = jax.random.normal(jax.random.key(1), SHAPE).at[:, 3:].set(1e3)
    whole, part = (GroupNorm(num_groups=4, runtime=Runtime(), filled=filled) for filled in (None, 3))
    params = nn.unbox(whole.init(jax.random.key(0), x))

    def total(layer: GroupNorm, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer.apply(params, x)[:, :3]))

    np.testing.assert_allclose(part.apply(params, x)[:, :3], whole.apply(params, x[:, :3]), rtol=1e-5, atol=1e-5)
    ours, theirs = jax.grad(lambda x: total(part, x))(x), jax.grad(lambda x: total(whole, x))(x[:, :3])
    np.testing.assert_allclose(ours[:, :3], theirs, rtol=1e-4, atol=1e-5)  # differences of float32 sums
    np.testing.assert_array_equal(ours[:, 3:], 0)
