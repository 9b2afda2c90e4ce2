"""Convolutions over height and width, channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from maxdiffusion.kernels.halo import Window, convolution
from maxdiffusion.nn.parameters import Initializer, lead_axes, parameter, uniform, zeros
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import QuantSpec


class Conv(nn.Module, kw_only=True):
    """A square kernel of shape (size, size, in, out); the rows of the picture may be cut over the mesh.

    Attributes:
        features: channels of the result.
        runtime: how the model runs.
        size: height and width of the kernel.
        stride: step in height and width.
        padding: zeros before and behind the picture, in height and width; None for `(size - 1) // 2` on each side.
        filled: rows of the picture that are no padding; None for all.
        kernel_init: initial kernel; None for uniform values of variance 1 / fan-in.
    """

    features: int
    runtime: Runtime
    size: int = 3
    stride: int = 1
    padding: tuple[int, int] | None = None
    filled: int | None = None
    kernel_init: Initializer | None = None

    @property
    def window(self) -> Window:
        """How the kernel moves, along the height and along the width."""
        before, after = self.padding or ((self.size - 1) // 2,) * 2
        return Window(size=self.size, stride=self.stride, before=before, after=after)

    @property
    def quant(self) -> QuantSpec | None:
        """How its product is quantised; None where it is not."""
        return self.runtime.quant.of("/".join(self.path))

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch h w features"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = self.kernel_init or uniform(self.size * self.size * x.shape[-1])
        kernel = parameter(self, "kernel", init, shape, (None, None, "conv_in", "conv_out"), self.runtime, inputs=3)
        bias = parameter(self, "bias", zeros, (self.features,), ("conv_out",), self.runtime)
        y = convolution(
            x.astype(self.runtime.dtype),
            kernel,
            rows=self.window,
            columns=self.window,
            layout=self.runtime.layout,
            filled=self.filled,
            precision=self.runtime.precision,
            quant=self.quant,
        )
        return y + lead_axes(bias, 4)


def conv_calls(run: Callable[..., Any], *shapes: Any) -> tuple[tuple[str, tuple[int, ...], Conv], ...]:
    """The convolutions that a function of modules calls, in order; it is traced, and nothing is computed.

    Args:
        run: calls modules.
        shapes: its arguments, as `jax.ShapeDtypeStruct`s.

    Returns:
        For each, its path joined by `/`, the shape of its feature map, and the layer.
    """
    calls: list[tuple[str, tuple[int, ...], Conv]] = []

    def follow(method: Callable[..., Any], args: Any, keywords: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if isinstance(layer, Conv) and context.method_name == "__call__":
            calls.append(("/".join(layer.path), args[0].shape, layer))
        return method(*args, **keywords)

    with nn.intercept_methods(follow):
        jax.eval_shape(run, *shapes)
    return tuple(calls)
