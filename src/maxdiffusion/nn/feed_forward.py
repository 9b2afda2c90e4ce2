"""The feed-forward network of a transformer block: gated (GEGLU, Shazeer 2020) or not (Vaswani et al. 2017)."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
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
        pair = checkpoint_name(pair, "hidden")
        y = pair[:, :, 0] * jax.nn.gelu(pair[:, :, 1], approximate=False)
        return self.runtime.layout.constrain(y, "activation_batch", "activation_length", "activation_mlp")


class GELU(nn.Module, kw_only=True):
    """`gelu(hidden)` by the tanh approximation (Hendrycks and Gimpel 2016).

    Attributes:
        features: number of hidden units.
        runtime: how the model runs.
    """

    features: int
    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length features"]:
        y = Dense(features=(self.features,), names=("embed", "mlp"), runtime=self.runtime, name="proj")(x)
        y = jax.nn.gelu(checkpoint_name(y, "hidden"), approximate=True)
        return self.runtime.layout.constrain(y, "activation_batch", "activation_length", "activation_mlp")


class FeedForward(nn.Module, kw_only=True):
    """`multiple` hidden units for each input, and back to the input's width.

    Attributes:
        runtime: how the model runs.
        hidden: `geglu` (gated) or `gelu-approximate`.
        multiple: hidden units for each input.
    """

    runtime: Runtime
    hidden: Literal["geglu", "gelu-approximate"] = "geglu"
    multiple: int = 4

    @nn.compact
    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        width = x.shape[-1]
        layer = GEGLU if self.hidden == "geglu" else GELU
        x = layer(features=self.multiple * width, runtime=self.runtime, name="net_0")(x)
        x = Dense(features=(width,), names=("mlp", "embed"), runtime=self.runtime, name="net_2")(x)
        x = self.runtime.layout.constrain(x, "activation_batch", "activation_length", "activation_embed")
        return checkpoint_name(x, "feed_forward")
