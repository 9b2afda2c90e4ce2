"""Modulation: shifts, scales and gates that a condition gives to every token (AdaLN, Peebles and Xie 2023)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.norms import standardise
from maxdiffusion.runtime import Runtime


class Modulation(nn.Module, kw_only=True):
    """`num_parts` vectors as wide as the condition, from one kernel of shape (embed, parts, width).

    The parts are a dimension of their own, so that sharding the width never parts a scale from its shift.

    Attributes:
        num_parts: number of vectors.
        runtime: how the model runs.
    """

    num_parts: int
    runtime: Runtime

    @nn.compact
    def __call__(self, cond: Float[Array, "batch width"]) -> tuple[Float32[Array, "batch 1 width"], ...]:
        features, names = (self.num_parts, cond.shape[-1]), ("embed", None, "mlp")
        parts = Dense(features=features, names=names, runtime=self.runtime, name="linear")(jax.nn.silu(cond))
        parts = self.runtime.layout.constrain(parts, "activation_batch", None, "activation_embed")
        return tuple(parts[:, index, None].astype(jnp.float32) for index in range(self.num_parts))


def modulate(
    x: Float[Array, "batch length width"],
    shift: Float32[Array, "batch 1 width"],
    scale: Float32[Array, "batch 1 width"],
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "batch length width"]:
    """`x` normalised over its width, times `1 + scale`, plus `shift`; all in float32, cast once to the dtype of x."""
    return (standardise(x.astype(jnp.float32), (x.ndim - 1,), epsilon) * (1 + scale) + shift).astype(x.dtype)
