"""Convolutions over height and width, channels last."""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from maxdiffusion.nn.parameters import Initializer, lead_axes, parameter, uniform, zeros
from maxdiffusion.runtime import Runtime


class Conv(nn.Module, kw_only=True):
    """A square kernel of shape (size, size, in, out) with `(size - 1) // 2` zeros around the picture.

    Attributes:
        features: channels of the result.
        runtime: how the model runs.
        size: height and width of the kernel.
        stride: step in height and width.
        kernel_init: initial kernel; None for uniform values of variance 1 / fan-in.
    """

    features: int
    runtime: Runtime
    size: int = 3
    stride: int = 1
    kernel_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch h w features"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = self.kernel_init or uniform(self.size * self.size * x.shape[-1])
        kernel = parameter(self, "kernel", init, shape, (None, None, "conv_in", "conv_out"), self.runtime)
        bias = parameter(self, "bias", zeros, (self.features,), ("conv_out",), self.runtime)
        pad = (self.size - 1) // 2
        y = jax.lax.conv_general_dilated(
            x.astype(self.runtime.dtype),
            kernel,
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=self.runtime.precision,
        )
        return y + lead_axes(bias, 4)
