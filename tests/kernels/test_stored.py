"""Stored kernels are what their definition says, and multiply as those that are quantised on the way do."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels import quantised
from maxdiffusion.kernels.stored import group_size, packed, rounded, stored, unpacked
from maxdiffusion.specs import QuantSpec

SCALE = 5e-7
"""Values are the same, and so are their sums, which are whole numbers; the last bits of a scale, that were made by
another program, and of two products with it may differ."""


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_every_pair_of_values_of_four_bits_comes_back(axis: int) -> None:
    pairs = np.array(list(itertools.product(range(-8, 8), repeat=2)), np.int8).reshape(-1)
    values = np.moveaxis(np.stack([pairs, pairs[::-1]]).reshape(2, 1, -1), -1, axis)
    bytes_ = packed(jnp.asarray(values), axis)
    assert bytes_.dtype == jnp.uint8 and bytes_.size * 2 == values.size
    np.testing.assert_array_equal(unpacked(bytes_, axis), values)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_a_product_with_a_stored_kernel_is_that_of_one_quantised_on_the_way(mode: Any) -> None:
    x, kernel = _values(3, 5, 2, 16), _values(2, 16, 4, 6, seed=1)
    kept = stored(jnp.asarray(kernel), mode, inputs=2, features=2)
    assert kept.shape == kernel.shape and kept.scale.shape == (1, 1, 4, 6) and kept.qvalue.dtype.itemsize == 1
    product = jax.jit(functools.partial(quantised.product, num_inputs=2, spec=QuantSpec(mode=mode)))
    np.testing.assert_allclose(product(x, kept), product(x, kernel), rtol=SCALE)
    # It lets gradients of what it is multiplied with pass, and has none itself.
    g = _values(3, 5, 4, 6, seed=2)
    dx = jax.jit(lambda x: jax.vjp(lambda x: product(x, kept), x)[1](g)[0])(x)
    wanted = np.einsum("blef,hdef->blhd", g, np.asarray(kept.whole(jnp.float32)))
    np.testing.assert_allclose(dx, wanted, atol=1e-5)  # float32 sums of 24 terms of size 1


def test_a_convolution_with_a_stored_kernel_is_that_of_one_quantised_on_the_way() -> None:
    x, kernel = _values(2, 6, 6, 8), _values(3, 3, 8, 5, seed=1)

    def run(x: Any, kernel: Any, dtype: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=dtype
        )

    convolution = jax.jit(functools.partial(quantised.convolution, run=run, spec=QuantSpec(mode="int8")))
    kept = stored(jnp.asarray(kernel), "int8", inputs=3, features=1)
    np.testing.assert_allclose(convolution(x, kept), convolution(x, kernel), rtol=SCALE)


def test_four_bits_have_a_scale_for_each_group_of_inputs() -> None:
    """The definition: of every 32 inputs and each output, the largest magnitude becomes 7. A scale in bfloat16 is off
    by 1 in 256 at most, which makes 7 / 256 of a step of the largest values beside half a step of rounding."""
    kernel = _values(2, 64, 6)
    kept = stored(jnp.asarray(kernel), "int4", inputs=2, features=1)
    assert kept.qvalue.shape == (2, 32, 6) and kept.scale.shape == (2, 2, 6) and kept.shape == kernel.shape
    groups = kernel.reshape(2, 2, 32, 6)
    steps = np.abs(groups).max(2, keepdims=True) / 7
    values = np.asarray(unpacked(kept.qvalue, -2)).reshape(groups.shape)
    np.testing.assert_array_equal(values, np.round(groups / steps))
    assert np.abs(values).max(2).min() == 7
    off = np.abs(np.asarray(kept.whole(jnp.float32)).reshape(groups.shape) - groups)
    assert (off <= (0.5 + 7 / 256) * steps).all()
    assert kept.nbytes == 0.28125 * 2 * kernel.size


def test_groups_divide_the_inputs() -> None:
    assert [group_size(inputs) for inputs in (8, 32, 48, 64, 320, 3072, 37)] == [8, 32, 48, 32, 32, 32, 37]
    odd = stored(jnp.asarray(_values(37, 4)), "int4", inputs=1, features=1)
    assert odd.packed is None and odd.qvalue.dtype == jnp.int8 and odd.scale.shape == (1, 4)


def test_stacked_kernels_have_scales_of_their_own() -> None:
    kernels = _values(3, 64, 5)
    for how, calibration in itertools.product(("int8", "fp8", "int4"), ("absmax", "rms,7", "fixed,1")):
        both = stored(jnp.asarray(kernels), how, inputs=1, features=1, calibration=calibration)
        for index in range(3):
            one = stored(jnp.asarray(kernels[index]), how, inputs=1, features=1, calibration=calibration)
            assert one.scale.shape == ((2, 5) if how == "int4" else (1, 5))
            jax.tree.map(np.testing.assert_array_equal, both.parts(lambda part, i=index: part[i]), one)


def test_a_rounded_kernel_is_what_is_stored_and_has_its_gradient() -> None:
    kernel = jnp.asarray(_values(64, 5))
    made, pull = jax.vjp(lambda kernel: rounded(kernel, 1, "absmax", "int4"), kernel)
    np.testing.assert_array_equal(made, stored(kernel, "int4", inputs=1, features=1).whole(jnp.float32))
    np.testing.assert_array_equal(pull(kernel)[0], kernel)


def test_a_rounded_kernel_has_no_gradient_where_it_is_clipped() -> None:
    kernel = jnp.asarray(_values(64, 5))
    _, pull = jax.vjp(lambda kernel: rounded(kernel, 1, "fixed,1", "int4"), kernel)
    beyond = np.abs(kernel) > 7.5 * np.float32(jnp.bfloat16(1 / 7.5))
    assert 0 < beyond.sum() < beyond.size
    np.testing.assert_array_equal(pull(jnp.ones_like(kernel))[0], np.where(beyond, 0, 1))
