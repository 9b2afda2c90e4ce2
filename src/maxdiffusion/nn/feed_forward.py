"""The gated feed-forward network of a transformer block (GEGLU, Shazeer 2020)."""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from maxdiffusion.nn.linear import Dense
from maxdiffusion.runtime import Runtime


class GEGLU(nn.Module, kw_only=True):
    """`hidden * gelu(gate)`, both from one kernel of shape (embed, 2, mlp).

    The pair is a dimension of its own, so that sharding the hidden units never parts a unit from its gate.

    Attributes:
        features: number of hidden units.
        runtime: how the model runs.
    """

    features: int
    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length features"]:
        pair = Dense(features=(2, self.features), names=("embed", None, "mlp"), runtime=self.runtime, name="proj")(x)
        y = pair[:, :, 0] * jax.nn.gelu(pair[:, :, 1], approximate=False)
        return self.runtime.layout.constrain(y, "activation_batch", "activation_length", "activation_mlp")


class FeedForward(nn.Module, kw_only=True):
    """GEGLU with `multiple` hidden units for each input, and back to the input's width.

    Attributes:
        runtime: how the model runs.
        multiple: hidden units for each input.
    """

    runtime: Runtime
    multiple: int = 4

    @nn.compact
    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        width = x.shape[-1]
        x = GEGLU(features=self.multiple * width, runtime=self.runtime, name="net_0")(x)
        x = Dense(features=(width,), names=("mlp", "embed"), runtime=self.runtime, name="net_2")(x)
        return self.runtime.layout.constrain(x, "activation_batch", "activation_length", "activation_embed")
