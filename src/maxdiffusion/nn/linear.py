"""Products with a matrix: dense layers that keep heads whole, and embedding tables."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxdiffusion.nn.parameters import Initializer, lead_axes, parameter, uniform, zeros
from maxdiffusion.runtime import Runtime


class Dense(nn.Module, kw_only=True):
    """Contracts the last `num_inputs` dimensions with a kernel of shape (*inputs, *features).

    A projection to heads has `features=(heads, kv)`, the way back `num_inputs=2`: no reshape ever cuts a head.

    Attributes:
        features: sizes of the new last dimensions.
        names: logical axis of each dimension of the kernel, inputs first.
        runtime: how the model runs.
        num_inputs: how many trailing dimensions are contracted.
        use_bias: whether a bias of shape `features` is added.
        kernel_init: initial kernel; None for uniform values of variance 1 / fan-in.
    """

    features: tuple[int, ...]
    names: tuple[str | None, ...]
    runtime: Runtime
    num_inputs: int = 1
    use_bias: bool = True
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        inputs = x.shape[x.ndim - self.num_inputs :]
        init = self.kernel_init or uniform(math.prod(inputs))
        kernel = parameter(self, "kernel", init, (*inputs, *self.features), self.names, self.runtime)
        contracted = tuple(range(x.ndim - self.num_inputs, x.ndim)), tuple(range(self.num_inputs))
        y = jax.lax.dot_general(
            x.astype(self.runtime.dtype), kernel, (contracted, ((), ())), precision=self.runtime.precision
        )
        if self.use_bias:
            bias = parameter(self, "bias", zeros, self.features, self.names[self.num_inputs :], self.runtime)
            y = y + lead_axes(bias, y.ndim)
        return y


class Embed(nn.Module, kw_only=True):
    """A table of `num_embeddings` rows; an index out of range gives a row of nan rather than a wrong row.

    Attributes:
        num_embeddings: number of rows.
        features: width of a row.
        runtime: how the model runs.
        names: logical axes of the table.
        table_init: initial table; None for uniform values of variance 0.02 squared.
    """

    num_embeddings: int
    features: int
    runtime: Runtime
    names: tuple[str, str] = ("vocab", "embed")
    table_init: Initializer | None = None

    @nn.compact
    def __call__(self, indices: Int[Array, "..."]) -> Float[Array, "... features"]:
        init = self.table_init or uniform(1, gain=0.02)
        shape = (self.num_embeddings, self.features)
        table: Any = parameter(self, "embedding", init, shape, self.names, self.runtime)
        # jnp.take counts negative indices from the end; here they are out of range as well.
        return jnp.take(table, jnp.where(indices < 0, self.num_embeddings, indices), axis=0, mode="fill")
