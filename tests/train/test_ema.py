"""The average moves by exact small steps in float32, and forgets the start."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from maxdiffusion.train import ema


def test_the_decay_grows_to_its_final_value() -> None:
    seen = [float(ema.decay_at(jnp.int32(step), 0.99)) for step in (0, 10, 890, 891, 10_000)]
    np.testing.assert_allclose(seen, [1 / 10, 11 / 20, 891 / 900, 0.99, 0.99], rtol=1e-6)


def test_small_steps_are_not_swallowed() -> None:
    """Decay 0.9999 for 100 steps from 1 towards 2 gives 1.00995; half precision stays at 1."""
    average = {"w": jnp.ones(3)}
    for _ in range(100):
        average = ema.update(average, {"w": jnp.full(3, 2.0, jnp.bfloat16)}, jnp.float32(0.9999))
    assert average["w"].dtype == jnp.float32
    np.testing.assert_allclose(average["w"], 2 - 0.9999**100, rtol=1e-5)
