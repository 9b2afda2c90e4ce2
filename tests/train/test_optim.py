"""The schedule counts optimizer steps; only kernels decay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.train.optim import learning_rate, optimizer


def test_the_warm_up_is_a_straight_line_that_starts_above_zero() -> None:
    rate = learning_rate(TrainSection(steps=100, learning_rate=0.5, warmup_steps=4, schedule="constant"))
    np.testing.assert_allclose([rate(step) for step in range(6)], [0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rtol=1e-6)


def test_the_cosine_ends_at_zero_after_the_last_step() -> None:
    rate = learning_rate(TrainSection(steps=12, learning_rate=1.0, warmup_steps=2, schedule="cosine"))
    np.testing.assert_allclose(rate(2), 1.0, rtol=1e-6)
    np.testing.assert_allclose(rate(7), 0.5, rtol=1e-6)
    np.testing.assert_allclose(rate(11), 0.5 * (1 + np.cos(np.pi * 0.9)), rtol=1e-4)
    assert float(rate(12)) == pytest.approx(0.0, abs=1e-7)
    assert float(rate(11)) > 0


def test_no_warm_up_starts_at_the_full_rate() -> None:
    rate = learning_rate(TrainSection(steps=10, learning_rate=1.0, warmup_steps=0, schedule="constant"))
    assert float(rate(0)) == 1.0


def test_only_kernels_decay() -> None:
    params = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 2))}, "positions": jnp.ones((3, 2))}
    rule = optimizer(TrainSection(learning_rate=0.1, warmup_steps=0, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = rule.update(zero, rule.init(params), params)
    np.testing.assert_allclose(updates["layer"]["kernel"], np.full((2, 2), -0.05), rtol=1e-6)
    np.testing.assert_array_equal(updates["layer"]["bias"], np.zeros((2, 2)))
    np.testing.assert_array_equal(updates["positions"], np.zeros((3, 2)))


@pytest.mark.parametrize(("clip", "same"), [(1.0, True), (None, False)])
def test_gradients_are_clipped_by_their_global_norm(clip: float | None, same: bool) -> None:
    """Beyond the limit only the direction counts; AdamW's first step hides sizes, so two steps are made."""
    params = {"kernel": jnp.ones(2)}
    rule = optimizer(TrainSection(learning_rate=0.1, warmup_steps=0, weight_decay=0.0, grad_clip=clip))
    seen = []
    for second in (10.0, 100.0):
        state = rule.init(params)
        _, state = rule.update({"kernel": jnp.array([3.0, 4.0])}, state, params)
        updates, _ = rule.update({"kernel": jnp.array([second, 0.0])}, state, params)
        seen.append(np.asarray(updates["kernel"]))
    assert np.allclose(*seen, rtol=1e-5) is same
