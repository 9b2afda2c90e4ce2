"""Normalisations: statistics, scale and bias in float32, one cast at the end."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.halo import zeroed
from maxdiffusion.nn.parameters import lead_axes, ones, parameter, zeros
from maxdiffusion.runtime import Runtime


def standardise(
    x: Float[Array, "..."], axes: tuple[int, ...], epsilon: float, *, filled: int | None = None
) -> Float[Array, "..."]:
    """Mean 0 and variance 1 over `axes`, in two passes: the difference of squares loses digits.

    Args:
        x: values, float32.
        axes: dimensions to average over.
        epsilon: added to the variance.
        filled: elements of dimension 1 (one of `axes`) that count, from the first on; None for all.
    """

    def mean(x: Array) -> Array:
        if filled is None:
            return jnp.mean(x, axes, keepdims=True)
        return jnp.mean(zeroed(x, filled), axes, keepdims=True) * (x.shape[1] / filled)

    centred = x - mean(x)
    return centred * jax.lax.rsqrt(mean(jnp.square(centred)) + epsilon)


class _Affine(nn.Module, kw_only=True):
    """What the norms share: `scale` and `bias` over the last dimension.

    Attributes:
        runtime: how the model runs.
        epsilon: added to the variance.
    """

    runtime: Runtime
    epsilon: float = 1e-5

    def affine(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        def vector(name: str) -> Array:
            init = ones if name == "scale" else zeros
            value = parameter(self, name, init, x.shape[-1:], ("norm",), self.runtime, dtype=jnp.float32)
            return lead_axes(value, x.ndim)

        return (x * vector("scale") + vector("bias")).astype(self.runtime.dtype)


class LayerNorm(_Affine, kw_only=True):
    """Normalises the last dimension (Ba et al. 2016)."""

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        def laid_out(x: Array) -> Array:
            if x.ndim != 3:
                return x
            return self.runtime.layout.constrain(x, "activation_batch", "activation_length", "activation_embed")

        # On both sides of the scale, or the partitioner cuts tokens as its gradient is stored, and sums statistics.
        return laid_out(self.affine(laid_out(standardise(x.astype(jnp.float32), (x.ndim - 1,), self.epsilon))))


class GroupNorm(_Affine, kw_only=True):
    """Normalises groups of neighbouring channels over every position of an example (Wu and He 2018).

    Attributes:
        num_groups: number of groups; divides the channels.
        filled: rows (of the first dimension of positions) that are no padding; None for all. Padding is normalised
            like the rest, and counts for nothing.

    Raises:
        UsageError: the channels do not divide into the groups.
    """

    num_groups: int
    filled: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "batch *positions channels"]) -> Float[Array, "batch *positions channels"]:
        channels = x.shape[-1]
        if channels % self.num_groups:
            raise UsageError(
                f"norm_num_groups={self.num_groups} does not divide {channels} channels: "
                "choose a divisor of every entry of block_out_channels"
            )
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], self.num_groups, channels // self.num_groups)
        axes = (*range(1, x.ndim - 1), x.ndim)
        return self.affine(standardise(grouped, axes, self.epsilon, filled=self.filled).reshape(x.shape))


class RMSNorm(nn.Module, kw_only=True):
    """Divides the last dimension by its root mean square (Zhang and Sennrich 2019); a `scale`, no bias.

    Attributes:
        runtime: how the model runs.
        epsilon: added to the mean square.
    """

    runtime: Runtime
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = parameter(self, "scale", ones, x.shape[-1:], ("norm",), self.runtime, dtype=jnp.float32)
        return (wide * lead_axes(scale, x.ndim)).astype(self.runtime.dtype)
