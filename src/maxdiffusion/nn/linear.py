"""Products with a matrix: dense layers that keep heads whole, and embedding tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxdiffusion.kernels import quantised
from maxdiffusion.kernels.stored import Stored
from maxdiffusion.nn.parameters import Initializer, lead_axes, parameter, uniform, zeros
from maxdiffusion.parallel.tensor import fan_in, fan_out
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import QuantSpec


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

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        kernel, bias = self.weights(x.shape[x.ndim - self.num_inputs :])
        return add_bias(product(x, kernel, self.num_inputs, self.runtime, self.quant), bias)

    @property
    def quant(self) -> QuantSpec | None:
        """How its product is quantised; None where it is not."""
        return self.runtime.quant.of("/".join(self.path))

    @nn.compact
    def weights(self, inputs: tuple[int, ...]) -> tuple[Any, Float[Array, "..."] | None]:
        """The kernel for inputs of these sizes (see `parameter`), and the bias if there is one, laid out for use."""
        init = self.kernel_init or uniform(math.prod(inputs))
        shape = (*inputs, *self.features)
        kernel = parameter(self, "kernel", init, shape, self.names, self.runtime, inputs=self.num_inputs)
        if not self.use_bias:
            return kernel, None
        return kernel, parameter(self, "bias", zeros, self.features, self.names[self.num_inputs :], self.runtime)


def product(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | Stored,
    num_inputs: int,
    runtime: Runtime,
    quant: QuantSpec | None = None,
) -> Array:
    """`x` times a kernel: its last `num_inputs` dimensions contracted with the kernel's first."""
    if quant is not None:
        return quantised.product(x.astype(runtime.dtype), kernel, num_inputs, quant, runtime.precision)
    assert not isinstance(kernel, Stored)
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    return jax.lax.dot_general(x.astype(runtime.dtype), kernel, (contracted, ((), ())), precision=runtime.precision)


def add_bias(y: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """`y` plus the bias of a layer, if it has one."""
    return y if bias is None else y + lead_axes(bias, y.ndim)


def read_by_all(layers: Sequence[Dense], x: Float[Array, "b l embed"]) -> list[Array]:
    """Each layer's result for the same `x`; where devices share the kernels, they sum the gradient of `x` once.

    Quantised layers each stand alone: their scales belong to whole rows and columns, which no device may hold.
    """
    if any(layer.quant for layer in layers):
        return [layer(x) for layer in layers]
    runtime = layers[0].runtime
    weights = [layer.weights(x.shape[-1:]) for layer in layers]
    kernels, names = [kernel for kernel, _ in weights], [layer.names for layer in layers]
    ys = fan_out(runtime.layout, functools.partial(product, num_inputs=1, runtime=runtime), x, kernels, names)
    return [add_bias(y, bias) for y, (_, bias) in zip(ys, weights, strict=True)]


def added_up(layers: Sequence[Dense], xs: Sequence[Float[Array, "b l ..."]]) -> Float[Array, "b l embed"]:
    """The sum of each layer's result for its own `x`; where devices share the kernels, they sum it once.

    Quantised layers each stand alone, as in `read_by_all`.
    """
    if any(layer.quant for layer in layers):
        return functools.reduce(jnp.add, (layer(x) for layer, x in zip(layers, xs, strict=True)))
    runtime = layers[0].runtime

    def of_one(x: Array, kernel: Array) -> Array:
        return product(x, kernel, kernel.ndim - 1, runtime)

    weights = [layer.weights(x.shape[2:]) for layer, x in zip(layers, xs, strict=True)]
    kernels, names = [kernel for kernel, _ in weights], [layer.names for layer in layers]
    y = fan_in(runtime.layout, of_one, xs, kernels, names)
    for _, bias in weights:
        y = add_bias(y, bias)
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
        table = self.runtime.layout.table(table, *self.names)
        # jnp.take counts negative indices from the end; here they are out of range as well.
        return jnp.take(table, jnp.where(indices < 0, self.num_embeddings, indices), axis=0, mode="fill")
