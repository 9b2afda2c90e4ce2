"""FLOPs of a function and its gradients are counted from its trace, and are those that its compiled program has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.kernels.flops import flops_of_gradients, meetings
from maxdiffusion.kernels.quantised import product
from maxdiffusion.specs import QuantMode, QuantSpec
from maxdiffusion.tools.flops import flops

N, WIDTH, DEPTH = 12, 16, 5
X = jax.ShapeDtypeStruct((N, WIDTH), jnp.float32)
PRODUCT = 2 * N * WIDTH * WIDTH


def _weights(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHT = _weights(WIDTH, WIDTH)


def _compiled(fn: Callable[..., Any], params: Any, *inputs: Any) -> int:
    """Of value and gradient, as the compiler left them."""
    gradients = jax.value_and_grad(lambda params, *inputs: jnp.sum(fn(params, *inputs)))
    return flops(jax.jit(gradients).lower(params, *inputs).compile().as_text() or "").total


def test_a_product_counts_once_and_once_more_for_each_factor_that_is_learnt() -> None:
    def first(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w)  # the data's own gradient is not taken

    def second(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w)

    assert flops_of_gradients(first, WEIGHT, X) == 2 * PRODUCT
    assert flops_of_gradients(second, WEIGHT, X) == 5 * PRODUCT == _compiled(second, WEIGHT, X)
    assert flops_of_gradients(lambda w, x: x @ x.T + w, _weights(N, N), X) == 2 * N * N * WIDTH


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_count_each_and_what_is_recomputed_does_not(remat: bool) -> None:
    def fn(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + jnp.sin(x @ w), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0]

    stacked = _weights(DEPTH, WIDTH, WIDTH)
    # Within the loop, x depends on weights from the second turn on: so all turns are counted as if it did.
    assert flops_of_gradients(fn, stacked, X) == 3 * DEPTH * PRODUCT
    assert _compiled(fn, stacked, X) == (4 if remat else 3) * DEPTH * PRODUCT


def test_branches_and_functions_with_their_own_gradients_are_looked_into() -> None:
    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))

    def fn(w: Any, x: Any) -> Any:
        y = jax.lax.cond(x[0, 0] > 0, lambda: product(w, x), lambda: x)
        return jax.jit(jax.nn.silu)(y)

    assert flops_of_gradients(fn, _weights(WIDTH, WIDTH), X) == 2 * PRODUCT


@pytest.mark.parametrize(
    ("stride", "padding", "groups", "gaps"),
    [(1, "SAME", 1, 1), (2, "SAME", 1, 1), (1, "VALID", 4, 1), (1, ((1, 2), (2, 1)), 1, 2)],
)
def test_convolutions_are_those_of_the_compiled_program(stride: int, padding: Any, groups: int, gaps: int) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(
            jnp.sin(x * w[1]),
            w[0],
            (stride, stride),
            padding,
            lhs_dilation=(gaps, gaps),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    params = (_weights(3, 3, 8 // groups, 4), _weights(8))
    x = jax.ShapeDtypeStruct((2, 7, 7, 8), jnp.float32)

    def widened(w: Any, x: Any) -> Any:
        return fn((w[0], w[1][None, None, None]), x)

    assert flops_of_gradients(widened, params, x) == _compiled(widened, params, x)


def test_pairs_of_output_and_tap_that_meet_a_value() -> None:
    assert meetings(5, 3, 5, stride=1, dilation=1, gaps=1, low=1) == 13
    assert meetings(5, 3, 3, stride=1, dilation=1, gaps=1, low=0) == 9
    assert meetings(3, 1, 5, stride=1, dilation=1, gaps=2, low=0) == 3


@pytest.mark.parametrize("mode", [None, "int8", "fp8_full"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_dtypes_count_as_large_ones(dtype: Any, mode: QuantMode | None) -> None:
    """Products of the backward pass are counted through casts, and through the rounding that gradients pass."""

    def fn(w: Any, x: Any) -> Any:
        def times(x: Any) -> Any:
            return x @ w.astype(dtype) if mode is None else product(x, w.astype(dtype), 1, QuantSpec(mode=mode))

        return jnp.sin(times(jnp.sin(times(x.astype(dtype)))))

    assert flops_of_gradients(fn, WEIGHT, X) == 5 * PRODUCT
