"""Products of quantised operands on Qwix: int8 or float8 values with float32 scales, and their gradients.

A scale belongs to all that one output element sums over: a token's row or a sample's feature map, and an output channel
of the kernel. On a mesh these are the whole ones, so quantised values do not depend on who holds what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.specs import QuantSpec

FORWARD = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "fp8_full": jnp.float8_e4m3fn}
"""What the operands of the forward pass are, by mode."""

BACKWARD = {"fp8_full": jnp.float8_e5m2}
"""What gradients are in the products of the backward pass, by mode; others keep these in the model's dtype."""


def qwix() -> Any:
    """The package Qwix, imported where something is quantised: it takes a third of a second."""
    import qwix

    return qwix


def quantised(x: Float[Array, "..."], dtype: Any, kept: Sequence[int], calibration: str) -> Any:
    """A `qwix.QArray` of `x` with a float32 scale for each index of the dimensions `kept`.

    Qwix maps the largest magnitude to 127.5, the border between two int8 values (-128 and -127): the last bit of a
    division would decide which of them it becomes, and differ between programs. Here it is mapped to 127.
    """
    method, _, factor = calibration.partition(",")
    if method == "absmax" and jnp.issubdtype(dtype, jnp.integer):
        calibration = f"absmax,{float(factor or 1) * 127.5 / 127}"
    return qwix().quantize(x.astype(jnp.float32), dtype, channelwise_axes=tuple(kept), calibration_method=calibration)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(
    x: Float[Array, "..."], kernel: Float[Array, "..."], num_inputs: int, spec: QuantSpec
) -> Float[Array, "..."]:
    """`x` times a kernel, both quantised: the last `num_inputs` dimensions of `x` contracted with the kernel's first.

    Gradients pass straight through the rounding, and stop where a calibration has clipped. Without a backward dtype
    they are those of the product of the operands as they were; with one, the incoming gradient is quantised as well,
    and multiplied with the quantised operands of the forward pass, whose scales it takes over first.

    Args:
        x: any floating dtype.
        kernel: (*inputs, *features), any floating dtype.
        num_inputs: how many dimensions are contracted.
        spec: how; its mode is not None.

    Returns:
        Array of the dtype of `x`.
    """
    return _product(x, kernel, num_inputs, spec)[0]


def _product(x: Array, kernel: Array, num_inputs: int, spec: QuantSpec) -> tuple[Array, Any]:
    forward, lead = FORWARD[spec.mode or ""], x.ndim - num_inputs
    a = quantised(x, forward, range(lead), spec.activations)
    b = quantised(kernel, forward, range(num_inputs, kernel.ndim), spec.weights)
    sums = _dot(a.qvalue, b.qvalue, range(lead, x.ndim), range(num_inputs))
    y = sums * _behind(a.scale, lead, kernel.ndim - num_inputs) * _before(b.scale, num_inputs, lead)
    kept = (a, b) if spec.mode in BACKWARD else (x, kernel)
    return y.astype(x.dtype), (kept, _within(x, a, spec.activations), _within(kernel, b, spec.weights))


def _product_gradients(num_inputs: int, spec: QuantSpec, kept: Any, g: Array) -> tuple[Array, Array]:
    (a, b), x_within, kernel_within = kept
    lead, dtype = a.ndim - num_inputs, g.dtype
    tokens, outputs, features = range(lead), range(lead, g.ndim), range(num_inputs, b.ndim)
    if spec.mode in BACKWARD:
        g = g.astype(jnp.float32)
        to_x = quantised(g * _before(b.scale, num_inputs, lead), BACKWARD[spec.mode], tokens, spec.gradients)
        to_kernel = quantised(g * _behind(a.scale, lead, len(features)), BACKWARD[spec.mode], outputs, spec.gradients)
        dx = _dot(to_x.qvalue, b.qvalue, outputs, features) * _behind(to_x.scale, lead, num_inputs)
        dkernel = _dot(a.qvalue, to_kernel.qvalue, tokens, tokens) * _before(to_kernel.scale, lead, num_inputs)
    else:
        dx, dkernel = _dot(g, b, outputs, features), _dot(a, g, tokens, tokens)
    return _masked(dx, x_within).astype(dtype), _masked(dkernel, kernel_within).astype(dtype)


def _dot(a: Array, b: Array, of_a: Sequence[int], of_b: Sequence[int]) -> Float[Array, "..."]:
    """`a` and `b` contracted over these dimensions: small values with sums of 32 bits, others as they are."""
    small = a.dtype.itemsize == 1
    sums = _sums(a.dtype) if small else None
    y = jax.lax.dot_general(a, b, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=sums)
    return y.astype(jnp.float32) if small else y


def _sums(dtype: Any) -> Any:
    """What products of such values are added up in."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def _behind(scale: Array, kept: int, added: int) -> Array:
    """The first `kept` dimensions of a scale, and dimensions of size 1 behind them."""
    return scale.reshape(scale.shape[:kept] + (1,) * added)


def _before(scale: Array, dropped: int, added: int) -> Array:
    """A scale without its first `dropped` dimensions, behind dimensions of size 1."""
    return scale.reshape((1,) * added + scale.shape[dropped:])


product.defvjp(_product, _product_gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolution(
    x: Float[Array, "batch height width channels"],
    kernel: Float[Array, "rows columns channels features"],
    run: Callable[..., Array],
    spec: QuantSpec,
) -> Float[Array, "batch h w features"]:
    """A convolution of quantised operands, as `product`; a sample's feature map has one scale.

    With a backward dtype, the quantised gradient and the quantised operands are multiplied as numbers of the model's
    dtype, which holds all their values: no compiler here convolves two float8 types that differ.

    Args:
        x: any floating dtype; channels last.
        kernel: any floating dtype.
        run: `run(x, kernel, dtype)` convolves arrays of any dtype and accumulates in `dtype` (None for their own).
        spec: how; its mode is not None.

    Returns:
        Array of the dtype of `x`.
    """
    return _convolution(x, kernel, run, spec)[0]


def _convolution(x: Array, kernel: Array, run: Callable[..., Array], spec: QuantSpec) -> tuple[Array, Any]:
    forward = FORWARD[spec.mode or ""]
    a, b = quantised(x, forward, (0,), spec.activations), quantised(kernel, forward, (3,), spec.weights)
    y = run(a.qvalue, b.qvalue, _sums(forward)).astype(jnp.float32) * a.scale * b.scale
    kept = (a, b) if spec.mode in BACKWARD else (x, kernel)
    return y.astype(x.dtype), (kept, _within(x, a, spec.activations), _within(kernel, b, spec.weights))


def _convolution_gradients(run: Callable[..., Array], spec: QuantSpec, kept: Any, g: Array) -> tuple[Array, Array]:
    (a, b), x_within, kernel_within = kept

    def pull(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda x, kernel: run(x, kernel, None), x, kernel)[1](g)

    if spec.mode in BACKWARD:
        dtype, method = BACKWARD[spec.mode], spec.gradients
        x, kernel = a.qvalue.astype(g.dtype), b.qvalue.astype(g.dtype)
        to_x = quantised(g.astype(jnp.float32) * b.scale, dtype, (0,), method)
        to_kernel = quantised(g.astype(jnp.float32) * a.scale, dtype, (3,), method)
        dx = pull(x, kernel, to_x.qvalue.astype(g.dtype))[0] * to_x.scale
        dkernel = pull(x, kernel, to_kernel.qvalue.astype(g.dtype))[1] * to_kernel.scale
    else:
        dx, dkernel = pull(a, b, g)
    return _masked(dx, x_within).astype(g.dtype), _masked(dkernel, kernel_within).astype(g.dtype)


convolution.defvjp(_convolution, _convolution_gradients)


def _within(x: Array, by: Any, calibration: str) -> Array | None:
    """Where `x` was not clipped; None where nothing can be."""
    method, _, factor = calibration.partition(",")
    if method == "absmax" and float(factor or 1) >= 1:
        return None
    dtype = by.qvalue.dtype
    largest = 127.5 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    return jnp.abs(x.astype(jnp.float32)) <= largest * by.scale


def _masked(gradient: Array, within: Array | None) -> Array:
    return gradient if within is None else jnp.where(within, gradient, 0)
