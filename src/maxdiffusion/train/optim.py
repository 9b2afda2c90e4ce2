"""AdamW with a warm-up, clipped by the global norm; the schedule counts optimizer steps, never devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxdiffusion.config.schema import TrainSection


def learning_rate(section: TrainSection) -> Callable[[Any], Float[Array, ""]]:
    """The learning rate of each optimizer step, counted from 0.

    It rises in a straight line, reaching its height in step `warmup_steps - 1` (step 0 learns already), and then stays
    or falls along half a cosine, which would be zero in the step after the last.

    Args:
        section: height, warm-up, schedule and number of steps.
    """

    def rate(count: Any) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        height = jnp.minimum(1.0, (step + 1) / max(section.warmup_steps, 1))
        if section.schedule == "cosine":
            length = max(section.steps - section.warmup_steps, 1)
            done = jnp.clip((step - section.warmup_steps) / length, 0.0, 1.0)
            height = height * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return section.learning_rate * height

    return rate


def optimizer(section: TrainSection) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) on float32 weights; only kernels decay, no biases, norms or tables.

    Args:
        section: rates, decays and the largest norm of the gradients.
    """
    adamw = optax.adamw(
        learning_rate(section),
        b1=section.beta1,
        b2=section.beta2,
        weight_decay=section.weight_decay,
        mask=_kernels,
    )
    if section.grad_clip is None:
        return optax.chain(adamw)
    return optax.chain(optax.clip_by_global_norm(section.grad_clip), adamw)


def _kernels(params: Any) -> Any:
    """True for the kernels of products and convolutions."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
