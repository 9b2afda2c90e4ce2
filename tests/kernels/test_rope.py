"""Rotary positions against complex numbers in float64: far positions, relative scores, bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.kernels.rope import rotate, rotation

DIMS = (4, 6, 6)
IDS = np.stack([np.zeros(7), np.arange(7), np.array([0, 3, 1, 90, 4000, 2, 5])], axis=1)


def expected(x: np.ndarray, ids: np.ndarray, theta: float = 1e4) -> np.ndarray:
    """Each pair of channels as a complex number times exp(i * position * frequency)."""
    phases = [
        ids[:, axis, None] * theta ** (-np.arange(dim // 2, dtype=np.float64) * 2 / dim)
        for axis, dim in enumerate(DIMS)
    ]
    pairs = x.astype(np.float64)[..., 0::2] + 1j * x.astype(np.float64)[..., 1::2]
    turned = pairs * np.exp(1j * np.concatenate(phases, axis=1))[None, :, None, :]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def test_pairs_are_turned_by_position_times_frequency() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 16))
    turn = rotation(jnp.asarray(IDS, jnp.int32)[None], DIMS)
    assert turn.cos.dtype == turn.sin.dtype == jnp.float32
    assert turn.cos.shape == (1, 7, 8)
    # The float32 phase at position 4000 is off by half a unit in the last place, 1.2e-4, its frequency by as much.
    np.testing.assert_allclose(rotate(x, turn), expected(np.asarray(x), IDS), rtol=0, atol=4 * 3e-4)
    near = [0, 1, 2, 3, 5, 6]
    np.testing.assert_allclose(rotate(x, turn)[:, near], expected(np.asarray(x), IDS)[:, near], rtol=0, atol=2e-5)


def test_scores_depend_on_the_difference_of_positions() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 7, 1, 16))

    def scores(shift: float) -> np.ndarray:
        turn = rotation(jnp.asarray(IDS[:, [0, 1, 1]] + shift)[None], DIMS)
        return np.einsum("bqhd,bkhd->qk", rotate(q, turn), rotate(k, turn))

    # phases up to 40 in float32
    np.testing.assert_allclose(scores(33.0), scores(0.0), rtol=0, atol=1e-4)


def test_far_positions_stay_apart_in_bfloat16() -> None:
    """In bfloat16 numbers beyond 256 are two apart."""
    ids = jnp.asarray([[[0, 0, 4000], [0, 0, 4001]]], jnp.int32)
    x = jnp.ones((1, 2, 1, 16), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        y = rotate(x, rotation(ids, DIMS))
    assert y.dtype == jnp.bfloat16
    assert np.abs(np.asarray(y[:, 0] - y[:, 1], np.float32)).max() > 0.5
