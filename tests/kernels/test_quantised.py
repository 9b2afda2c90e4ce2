"""Quantised products are what their definition says, and so are their gradients."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.halo import Window, convolution
from maxdiffusion.kernels.quantised import MOST_TERMS, product
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import QuantSpec

F32 = 2e-6
"""Float32 sums of a few hundred terms in another order; the quantised values themselves are equal to the bit."""

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _quantised(x: np.ndarray, axes: tuple[int, ...], mode: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values on the grid of a dtype, and scales, by the definition: the largest magnitude is the dtype's largest."""
    largest = 127.0 if mode == "int8" else float(ml_dtypes.finfo(mode).max)
    scale = (np.abs(x).max(axes, keepdims=True) / np.float32(largest)).astype(np.float32)
    grid = np.round(x / scale) if mode == "int8" else (x / scale).astype(mode).astype(np.float32)
    return grid, scale


def _close(got: Any, wanted: np.ndarray, limit: float = F32) -> None:
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error <= limit, error


@pytest.mark.parametrize(("mode", "grid"), [("int8", "int8"), ("fp8", E4M3)])
def test_a_product_is_that_of_values_on_a_grid(mode: Any, grid: Any) -> None:
    x, kernel = _values(3, 5, 2, 16), _values(2, 16, 4, 6, seed=1)
    (a, a_scale), (b, b_scale) = _quantised(x, (2, 3), grid), _quantised(kernel, (0, 1), grid)
    wanted = np.einsum("blhd,hdef->blef", (a * a_scale).astype(np.float64), (b * b_scale).astype(np.float64))
    got = jax.jit(functools.partial(product, num_inputs=2, spec=QuantSpec(mode=mode)))(x, kernel)
    _close(got, wanted)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_gradients_of_the_forward_modes_pass_straight_through(mode: Any) -> None:
    x, kernel, g = _values(3, 5, 16), _values(16, 4, 6, seed=1), _values(3, 5, 4, 6, seed=2)
    _, pull = jax.vjp(functools.partial(product, num_inputs=1, spec=QuantSpec(mode=mode)), x, kernel)
    dx, dkernel = pull(jnp.asarray(g))
    _close(dx, np.einsum("blef,def->bld", g.astype(np.float64), kernel))
    _close(dkernel, np.einsum("blef,bld->def", g.astype(np.float64), x))


def test_gradients_of_fp8_full_are_products_of_quantised_values() -> None:
    """The scales of the other operand go into the gradient before it is rounded: the sum runs over their dimension."""
    x, kernel, g = _values(3, 5, 16), _values(16, 4, 6, seed=1), _values(3, 5, 4, 6, seed=2)
    (a, a_scale), (b, b_scale) = _quantised(x, (2,), E4M3), _quantised(kernel, (0,), E4M3)
    to_x, to_x_scale = _quantised(g * b_scale[None], (2, 3), E5M2)
    to_kernel, to_kernel_scale = _quantised(g * a_scale[..., None], (0, 1), E5M2)
    _, pull = jax.vjp(functools.partial(product, num_inputs=1, spec=QuantSpec(mode="fp8_full")), x, kernel)
    dx, dkernel = pull(jnp.asarray(g))
    _close(dx, np.einsum("blef,def->bld", to_x.astype(np.float64), b) * to_x_scale[..., 0])
    _close(dkernel, np.einsum("blef,bld->def", to_kernel.astype(np.float64), a) * to_kernel_scale[0])


def test_tiny_gradients_of_fp8_full_are_kept() -> None:
    """Those of a large batch: relative errors are those of any size, at most 1/8 a value in e5m2, less in a sum."""
    x, kernel, g = _values(3, 16), _values(16, 8, seed=1), _values(3, 8, seed=2) * np.float32(1e-14)
    _, pull = jax.vjp(functools.partial(product, num_inputs=1, spec=QuantSpec(mode="fp8_full")), x, kernel)
    dx, dkernel = pull(jnp.asarray(g))
    _close(dx, g.astype(np.float64) @ kernel.T, 0.125)
    _close(dkernel, x.T.astype(np.float64) @ g, 0.125)


def test_a_convolution_in_float16_does_not_overflow() -> None:
    x, kernel = _values(2, 4, 4, 8).astype(np.float16), _values(3, 3, 8, 8, seed=1).astype(np.float16)
    window = Window(size=3, before=1, after=1)

    def total(x: Any, kernel: Any) -> Any:
        quant = QuantSpec(mode="fp8_full")
        y = convolution(x, kernel, rows=window, columns=window, layout=Layout(), quant=quant)
        return jnp.sum(y.astype(jnp.float32))

    for gradient in jax.grad(total, (0, 1))(x, kernel):
        assert gradient.dtype == jnp.float16 and np.isfinite(np.asarray(gradient)).all()


def test_what_a_calibration_clips_has_no_gradient() -> None:
    spec = QuantSpec(mode="int8", activations="fixed,1", weights="absmax,0.5")
    x, kernel = _values(4, 16), _values(16, 8, seed=1)
    y, pull = jax.vjp(functools.partial(product, num_inputs=1, spec=spec), x, kernel)
    dx, dkernel = pull(jnp.ones((4, 8)))
    clipped, cut = np.abs(x) > 1, np.abs(kernel) > 0.5 * np.abs(kernel).max(0) * 127.5 / 127
    assert 0 < clipped.sum() < clipped.size and 0 < cut.sum() < cut.size
    np.testing.assert_array_equal(np.asarray(dx) == 0, clipped)
    np.testing.assert_array_equal(np.asarray(dkernel) == 0, cut)
    _close(y, np.clip(x, -1, 1) @ np.clip(kernel, *(s * 0.5 * np.abs(kernel).max(0) for s in (-1, 1))), 2e-2)


@pytest.mark.parametrize("calibration", ["absmax", "absmax,0.5", "rms,7", "fixed,10"])
@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(mode: Any, calibration: str, broken: float) -> None:
    """In the rows that sum over it, and nowhere else: integers have no NaN."""
    x, kernel = _values(4, 16), _values(16, 8, seed=1)
    x[1, 3] = broken
    spec = QuantSpec(mode=mode, activations=calibration, weights=calibration)
    finite = np.isfinite(product(x, kernel, 1, spec))
    np.testing.assert_array_equal(finite, np.arange(4)[:, None].repeat(8, 1) != 1)
    kernel[2, 5] = broken
    finite &= np.isfinite(product(np.nan_to_num(x, nan=0, posinf=0, neginf=0), kernel, 1, spec))
    assert finite.sum() == 3 * 7


@pytest.mark.parametrize("mode", ["int8", "fp8", "fp8_full"])
def test_rows_of_zeros_are_zeros(mode: Any) -> None:
    """Neither their products nor their gradients are divided by a scale of nothing."""
    x, kernel, g = _values(4, 16), _values(16, 8, seed=1), _values(4, 8, seed=2)
    x[2], kernel[:, 3], g[1] = 0, 0, 0
    y, pull = jax.vjp(functools.partial(product, num_inputs=1, spec=QuantSpec(mode=mode)), x, kernel)
    dx, dkernel = map(np.asarray, pull(jnp.asarray(g)))
    assert not np.asarray(y)[2].any() and not np.asarray(y)[:, 3].any() and not dx[1].any()
    assert all(np.isfinite(made).all() and np.abs(made).sum() for made in (np.asarray(y), dx, dkernel))


def test_sums_that_int32_cannot_hold_are_refused() -> None:
    spec = QuantSpec(mode="int8")
    most = np.ones((1, MOST_TERMS), np.float32)
    assert product(most, most.T, 1, spec) == pytest.approx(MOST_TERMS, rel=F32)
    more = np.ones((1, MOST_TERMS + 1), np.float32)
    with pytest.raises(UsageError, match=r"sums over 131,072 inputs.*quantization_exclude"):
        product(more, more.T, 1, spec)


@pytest.mark.parametrize("mode", ["int8", "fp8", "fp8_full"])
def test_a_convolution_is_the_product_of_its_windows(mode: Any) -> None:
    """One scale a feature map instead of one a row is all that differs, so the maps here have one element a row."""
    x, kernel, g = _values(4, 1, 1, 16), _values(1, 1, 16, 8, seed=1), _values(4, 1, 1, 8, seed=2)
    spec, window = QuantSpec(mode=mode), Window(size=1)

    def convolve(x: Any, kernel: Any) -> Any:
        return convolution(x, kernel, rows=window, columns=window, layout=Layout(), quant=spec)

    y, pull = jax.vjp(convolve, x, kernel)
    wanted, pulled = jax.vjp(functools.partial(product, num_inputs=1, spec=spec), x[:, 0, 0], kernel[0, 0])
    _close(y, np.asarray(wanted)[:, None, None])
    for got, want in zip(pull(jnp.asarray(g)), pulled(jnp.asarray(g[:, 0, 0])), strict=True):
        _close(np.ravel(got), np.ravel(np.asarray(want)))


@pytest.mark.parametrize("mode", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_convolution_for_gpus_multiplies_the_same_values_wider(
    mode: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 holds them all; its results are rounded once more before the scales, by at most one part in 256."""
    x, kernel, window = _values(2, 6, 4, 8), _values(3, 3, 8, 8, seed=1), Window(size=3, before=1, after=1)

    def run() -> jax.Array:
        given = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
        return convolution(*given, rows=window, columns=window, layout=Layout(), quant=QuantSpec(mode=mode))

    small = str(jax.make_jaxpr(lambda: run())())
    wanted = run()
    monkeypatch.setattr(Layout, "platform", "gpu")
    wide = str(jax.make_jaxpr(lambda: run())())
    in_short = {"int8": "i8", "fp8": "f8_e4m3fn"}[mode]
    products = re.compile(r":(\w+)\[[0-9,]*\] = conv_general_dilated")
    assert products.findall(small) == [{"int8": "i32", "fp8": "f32"}[mode]] and in_short in small
    assert products.findall(wide) == ["f32" if dtype == jnp.float32 else "bf16"]
    got = run()
    assert got.dtype == dtype
    _close(got, np.asarray(wanted, np.float64), F32 if dtype == jnp.float32 else 2**-8)


def test_backward_convolutions_of_a_bfloat16_model_multiply_bfloat16() -> None:
    """Which hold all values of both float8 types; the sums are rounded once more, by at most one part in 256."""
    x, kernel, window = _values(2, 6, 4, 8), _values(3, 3, 8, 8, seed=1), Window(size=3, before=1, after=1)

    def pulled(dtype: Any) -> Any:
        def convolve(x: Any, kernel: Any) -> Any:
            quant = QuantSpec(mode="fp8_full")
            return convolution(x, kernel, rows=window, columns=window, layout=Layout(), quant=quant)

        y, pull = jax.vjp(convolve, *(jnp.asarray(given, jnp.bfloat16).astype(dtype) for given in (x, kernel)))
        g = jnp.asarray(_values(*y.shape, seed=2), jnp.bfloat16).astype(dtype)
        products = re.findall(r":(\w+)\[[0-9,]*\] = conv_general_dilated", str(jax.make_jaxpr(pull)(g)))
        return pull(g), products

    narrow, in_bfloat16 = pulled(jnp.bfloat16)
    wide, in_float32 = pulled(jnp.float32)
    assert set(in_bfloat16) == {"bf16"} and set(in_float32) == {"f32"}
    for got, wanted in zip(narrow, wide, strict=True):
        assert got.dtype == jnp.bfloat16
        _close(got, np.asarray(wanted, np.float64), 2**-7)  # rounded before the scale, and behind it


def test_padded_rows_have_no_say_in_the_scales() -> None:
    x, kernel, window = _values(2, 6, 4, 8), _values(3, 3, 8, 8, seed=1), Window(size=3, before=1, after=1)
    x[:, 4:] = 1e4
    convolve = functools.partial(
        convolution, rows=window, columns=window, layout=Layout(), filled=4, quant=QuantSpec(mode="int8")
    )
    wanted = convolution(x, kernel, rows=window, columns=window, layout=Layout(), filled=4)
    _close(convolve(x, kernel), np.asarray(wanted, np.float64), 2e-2)


def test_a_sum_over_devices_is_a_sum_of_integers(fsdp_tensor: Mesh) -> None:
    """Where the summed dimension is cut, every device quantises by the whole row's scale: the result is the same."""
    layout = Layout.of(fsdp_tensor, None)
    x, kernel, spec = _values(8, 4, 32), _values(32, 16, seed=1), QuantSpec(mode="int8")

    def run(x: Any, kernel: Any) -> Any:
        x = layout.constrain(x, "activation_batch", "activation_length", "activation_mlp")
        return product(x, layout.constrain(kernel, "mlp", "embed"), 1, spec)

    compiled = jax.jit(run).lower(*jax.device_put((x, kernel), layout.replicated)).compile()
    assert re.search(r"s32\[[^=]*all-reduce\(", compiled.as_text())
    got = compiled(*jax.device_put((x, kernel), layout.replicated))
    np.testing.assert_array_equal(
        np.asarray(got), np.asarray(jax.jit(functools.partial(product, num_inputs=1, spec=spec))(x, kernel))
    )
