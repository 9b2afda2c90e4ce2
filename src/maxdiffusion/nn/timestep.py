"""Time as a vector: sinusoids with float32 phases, then a two-layer network."""

from __future__ import annotations

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from maxdiffusion.nn.activations import activation
from maxdiffusion.nn.linear import Dense
from maxdiffusion.runtime import Runtime


def sinusoids(
    values: Num[Array, "*batch"],
    features: int,
    *,
    flip_sin_to_cos: bool = False,
    freq_shift: float = 0.0,
    max_period: float = 10_000.0,
) -> Float[Array, "*batch features"]:
    """Sines and cosines of each value at geometric frequencies (Ho et al. 2020, after Vaswani et al. 2017).

    The frequencies are made in float64 on the host and the phases are float32, whatever the model's dtype.

    Args:
        values: timesteps, of any numeric dtype.
        features: width of the result; an odd width ends with a zero.
        flip_sin_to_cos: cosines first.
        freq_shift: subtracted from the number of frequencies in the exponent's denominator.
        max_period: longest period over 2 pi, reached with `freq_shift=1`.

    Returns:
        float32.
    """
    half = features // 2
    frequencies = np.exp(-math.log(max_period) * np.arange(half, dtype=np.float64) / (half - freq_shift))
    frequencies = frequencies.astype(np.float32).reshape((1,) * values.ndim + (half,))
    phases = values.astype(jnp.float32)[..., None] * frequencies
    parts = [jnp.cos(phases), jnp.sin(phases)] if flip_sin_to_cos else [jnp.sin(phases), jnp.cos(phases)]
    if features % 2:
        parts.append(jnp.zeros((*values.shape, 1), jnp.float32))
    return jnp.concatenate(parts, axis=-1)


class TimestepEmbedding(nn.Module, kw_only=True):
    """Two dense layers with an activation between, from the sinusoids to the width of the blocks.

    Attributes:
        features: width of the result, and of the hidden layer.
        runtime: how the model runs.
        act_fn: name of the activation.
    """

    features: int
    runtime: Runtime
    act_fn: str = "silu"

    @nn.compact
    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch features"]:
        layout = self.runtime.layout
        x = Dense(features=(self.features,), names=("embed", "mlp"), runtime=self.runtime, name="linear_1")(x)
        x = layout.constrain(activation(self.act_fn)(x), "activation_batch", "activation_mlp")
        x = Dense(features=(self.features,), names=("mlp", "embed"), runtime=self.runtime, name="linear_2")(x)
        return layout.constrain(x, "activation_batch", "activation_embed")
