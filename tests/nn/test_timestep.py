"""Time embeddings: exact phases at any time and dtype."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.nn.timestep import TimestepEmbedding, sinusoids
from maxdiffusion.runtime import Runtime


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("features", "shift", "period"), [(8, 0.0, 10_000.0), (7, 1.0, 100.0)])
def test_sinusoids_match_float64(flip: bool, features: int, shift: float, period: float) -> None:
    times = np.array([0.0, 0.25, 37.0, 999.0])
    half = features // 2
    phases = times[:, None] * period ** (-np.arange(half) / (half - shift))[None]
    parts = [np.cos(phases), np.sin(phases)] if flip else [np.sin(phases), np.cos(phases)]
    expected = np.concatenate([*parts, np.zeros((4, features % 2))], axis=1)
    got = sinusoids(
        jnp.asarray(times, jnp.float32), features, flip_sin_to_cos=flip, freq_shift=shift, max_period=period
    )
    # A frequency and a phase rounded to float32 are each off by eps / 2, at a phase of at most 999.
    np.testing.assert_allclose(got, expected, atol=999 * np.finfo(np.float32).eps, rtol=0)


def test_integer_times_and_further_axes() -> None:
    got = sinusoids(jnp.array([[1, 2, 3], [4, 5, 999]]), 8)
    assert got.shape == (2, 3, 8)
    np.testing.assert_array_equal(got[1, 2], sinusoids(jnp.float32(999), 8))


def test_phases_are_float32_whatever_the_input() -> None:
    """Times up to 256 are exact in bfloat16; their phases would not be."""
    times = jnp.array([255.0, 101.0])
    np.testing.assert_array_equal(sinusoids(times.astype(jnp.bfloat16), 16), sinusoids(times, 16))


def test_two_layers_of_the_formula() -> None:
    layer = TimestepEmbedding(features=6, runtime=Runtime(precision=jax.lax.Precision.HIGHEST))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    params = nn.unbox(layer.init(jax.random.key(0), x))
    first, second = (np.asarray(params["params"][name]["kernel"], np.float64) for name in ("linear_1", "linear_2"))
    hidden = np.asarray(x, np.float64) @ first
    expected = (hidden / (1 + np.exp(-hidden))) @ second
    np.testing.assert_allclose(layer.apply(params, x), expected, rtol=1e-5, atol=1e-5)
