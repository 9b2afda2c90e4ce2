"""The exponential moving average of the weights: float32, and short-sighted at first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decay_at(step: Int[Array, ""], decay: float) -> Float[Array, ""]:
    """The decay of step `step` (counted from 0): min(decay, (1 + step) / (10 + step)), as in TensorFlow's average.

    The average forgets the random start within the first steps, whatever the final decay.
    """
    step = jnp.asarray(step, jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1 + step) / (10 + step))


def update(average: Any, params: Any, decay: Float[Array, ""]) -> Any:
    """average <- decay average + (1 - decay) params, in float32: half precision would swallow small steps.

    Args:
        average: tree of float32 arrays.
        params: the same tree, new weights.
        decay: from `decay_at`.
    """
    return jax.tree.map(lambda old, new: old + (1 - decay) * (new.astype(jnp.float32) - old), average, params)
