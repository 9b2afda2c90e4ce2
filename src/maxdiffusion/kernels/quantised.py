"""Products of quantised operands on Qwix: int8 or float8 values with float32 scales, and their gradients.

A scale belongs to all that one output element sums over: a token's row or a sample's feature map, and an output channel
of the kernel. On a mesh these are the whole ones, so quantised values do not depend on who holds what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.scales import clipped, quantised
from maxdiffusion.kernels.stored import DTYPES, Stored
from maxdiffusion.specs import QUANT_KEYWORDS, STORED_AS, QuantSpec

FORWARD = {mode: DTYPES[STORED_AS[mode]] for mode in ("int8", "fp8", "fp8_full")}
"""What the operands of the forward pass are, by mode."""

BACKWARD = {"fp8_full": jnp.float8_e5m2}
"""What gradients are in the products of the backward pass, by mode; others keep these in the model's dtype."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | Stored,
    num_inputs: int,
    spec: QuantSpec,
    precision: jax.lax.Precision | None = None,
) -> Float[Array, "..."]:
    """`x` times a kernel, both quantised: the last `num_inputs` dimensions of `x` contracted with the kernel's first.

    Gradients pass straight through the rounding, and stop where a calibration has clipped. Without a backward dtype
    they are those of the product of the operands as they were; with one, the incoming gradient is quantised as well,
    and multiplied with the quantised operands of the forward pass, whose scales it takes over first.

    Args:
        x: any floating dtype.
        kernel: (*inputs, *features), any floating dtype; or stored in the dtype of the mode, without a gradient.
        num_inputs: how many dimensions are contracted.
        spec: how; its mode is not None.
        precision: of the products of the backward pass whose operands are not quantised.

    Returns:
        Array of the dtype of `x`.
    """
    return _product(x, kernel, num_inputs, spec, precision)[0]


def _product(
    x: Array, kernel: Array | Stored, num_inputs: int, spec: QuantSpec, precision: Any
) -> tuple[Array, tuple[Array, Array | Stored]]:
    del precision
    a, b = _operands(x, kernel, range(x.ndim - num_inputs), range(num_inputs, kernel.ndim), spec)
    lead = x.ndim - num_inputs
    sums = _dot(a.qvalue, b.qvalue, range(lead, x.ndim), range(num_inputs))
    y = sums * _behind(a.scale, lead, kernel.ndim - num_inputs) * _before(b.scale, num_inputs, lead)
    return y.astype(x.dtype), (x, kernel)


def _product_gradients(
    num_inputs: int, spec: QuantSpec, precision: Any, kept: tuple[Array, Array | Stored], g: Array
) -> tuple[Array, Array | None]:
    x, kernel = kept
    lead = x.ndim - num_inputs
    tokens, outputs, features = range(lead), range(lead, g.ndim), range(num_inputs, kernel.ndim)
    a, b = _operands(x, kernel, tokens, features, spec)
    if spec.mode in BACKWARD:
        to_x = _gradient(g, _before(b.scale, num_inputs, lead), tokens, spec)
        to_kernel = _gradient(g, _behind(a.scale, lead, len(features)), outputs, spec)
        dx = _dot(to_x.qvalue, b.qvalue, outputs, features) * (_behind(to_x.scale, lead, num_inputs) / _LIFT)
        dkernel = _dot(a.qvalue, to_kernel.qvalue, tokens, tokens)
        dkernel = dkernel * (_before(to_kernel.scale, lead, num_inputs) / _LIFT)
    else:
        dx = _dot(g, _plain(kernel, x), outputs, features, precision)
        dkernel = _dot(x, g, tokens, tokens, precision)
    return _unclipped(dx, x, a, spec.activations), _of_kernel(dkernel, kernel, b, spec)


def _operands(
    x: Array, kernel: Array | Stored, of_x: Sequence[int], of_kernel: Sequence[int], spec: QuantSpec
) -> tuple[Any, Any]:
    """Both operands quantised, with a scale for each index of these dimensions; a stored kernel has its own.

    The backward pass calls this again: what it keeps are the operands as they came, of which the policy of a
    rematerialised block knows which are gathered weights.
    """
    assert spec.mode is not None
    forward = FORWARD[spec.mode]
    a = quantised(x, forward, of_x, spec.activations)
    return a, kernel if isinstance(kernel, Stored) else quantised(kernel, forward, of_kernel, spec.weights)


def _plain(kernel: Array | Stored, like: Array) -> Array:
    """A kernel as an array of the dtype of another."""
    return kernel.whole(like.dtype) if isinstance(kernel, Stored) else kernel


def _of_kernel(gradient: Array, kernel: Array | Stored, by: Any, spec: QuantSpec) -> Array | None:
    """The gradient of a kernel; a stored one has none."""
    return None if isinstance(kernel, Stored) else _unclipped(gradient, kernel, by, spec.weights)


def _gradient(g: Array, scale: Array, kept: Sequence[int], spec: QuantSpec) -> Any:
    """An incoming gradient, times the scale of the operand that it meets and `_LIFT`, quantised."""
    assert spec.mode is not None
    return quantised(g.astype(jnp.float32) * (scale * _LIFT), BACKWARD[spec.mode], kept, spec.gradients)


_LIFT = 2.0**40
"""Gradients are quantised this much larger, exactly: Qwix takes a scale below 1e-19 for that of zeros alone, which
those of a large batch come near."""


def _dot(a: Array, b: Array, of_a: Sequence[int], of_b: Sequence[int], precision: Any = None) -> Float[Array, "..."]:
    """`a` and `b` contracted over these dimensions: small values with sums of 32 bits, others as they are."""
    small = a.dtype.itemsize == 1
    sums = _sums(a.dtype, math.prod(a.shape[axis] for axis in of_a)) if small else None
    contracted = ((tuple(of_a), tuple(of_b)), ((), ()))
    y = jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=sums)
    return y.astype(jnp.float32) if small else y


def _sums(dtype: Any, terms: int) -> Any:
    """What so many products of such values are added up in.

    Raises:
        UsageError: a sum could be larger than 32 bits hold.
    """
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.float32
    if terms > MOST_TERMS:
        raise UsageError(
            f"quantization: a product sums over {terms:,} inputs, and int32 holds {MOST_TERMS:,} products of int8: "
            f"leave that layer out with {QUANT_KEYWORDS['exclude']}, or write quantization='fp8'"
        )
    return jnp.int32


MOST_TERMS = (2**31 - 1) // 128**2
"""How many products of two int8 values int32 holds the sum of, whatever they are."""


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
    kernel: Float[Array, "rows columns channels features"] | Stored,
    run: Callable[..., Array],
    spec: QuantSpec,
) -> Float[Array, "batch h w features"]:
    """A convolution of quantised operands, as `product`; a sample's feature map has one scale.

    With a backward dtype, the quantised gradient and the quantised operands are multiplied as wider numbers, which
    hold all their values: no compiler here convolves two float8 types that differ. In a bfloat16 model these are
    bfloat16, and a sum is rounded once before its scale as well; else float32.

    Args:
        x: any floating dtype; channels last.
        kernel: any floating dtype; or stored in the dtype of the mode.
        run: `run(x, kernel, dtype)` convolves arrays of any dtype and accumulates in `dtype` (None for their own).
        spec: how; its mode is not None.

    Returns:
        Array of the dtype of `x`.
    """
    return _convolution(x, kernel, run, spec)[0]


def _convolution(
    x: Array, kernel: Array | Stored, run: Callable[..., Array], spec: QuantSpec
) -> tuple[Array, tuple[Array, Array | Stored]]:
    a, b = _operands(x, kernel, (0,), (3,), spec)
    sums = _sums(a.qvalue.dtype, math.prod(kernel.shape[:-1]))
    y = run(a.qvalue, b.qvalue, sums).astype(jnp.float32) * a.scale * b.scale
    return y.astype(x.dtype), (x, kernel)


def _convolution_gradients(
    run: Callable[..., Array], spec: QuantSpec, kept: tuple[Array, Array | Stored], g: Array
) -> tuple[Array, Array | None]:
    x, kernel = kept
    a, b = _operands(x, kernel, (0,), (3,), spec)

    def pull(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda x, kernel: run(x, kernel, None), x, kernel)[1](g)

    if spec.mode in BACKWARD:
        wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        values = a.qvalue.astype(wide), b.qvalue.astype(wide)
        to_x, to_kernel = _gradient(g, b.scale, (0,), spec), _gradient(g, a.scale, (3,), spec)
        dx = pull(*values, to_x.qvalue.astype(wide))[0].astype(jnp.float32) * (to_x.scale / _LIFT)
        dkernel = pull(*values, to_kernel.qvalue.astype(wide))[1].astype(jnp.float32) * (to_kernel.scale / _LIFT)
    else:
        dx, dkernel = pull(x, _plain(kernel, x), g)
    return _unclipped(dx, x, a, spec.activations), _of_kernel(dkernel, kernel, b, spec)


convolution.defvjp(_convolution, _convolution_gradients)


def _unclipped(gradient: Array, x: Array, by: Any, calibration: str) -> Array:
    """A gradient of `x`, zero where its quantised form `by` was clipped, in the dtype of `x`."""
    beyond = clipped(x, by.scale, by.qvalue.dtype, calibration)
    return (gradient if beyond is None else jnp.where(beyond, 0, gradient)).astype(x.dtype)
