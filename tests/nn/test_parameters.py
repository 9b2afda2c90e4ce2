"""Declared parameters: their names, and initial values that depend on the key and the path alone."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.parameters import (
    Constant,
    Parameter,
    Uniform,
    drawing,
    initial_values,
    lead_axes,
    parameter,
    parameter_names,
    uniform,
    zeros,
)
from maxdiffusion.nn.random_bits import weights_key
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime


class Two(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            x = Dense(features=(16,), names=("embed", "mlp"), runtime=Runtime(), name=name)(x)
        return x


def boxed() -> dict:
    return jax.eval_shape(lambda: Two().init(jax.random.key(0), jnp.ones((1, 16)))["params"])


def test_a_parameter_is_boxed_with_its_names_and_initializer() -> None:
    box = boxed()["first"]["kernel"]
    assert isinstance(box, Parameter)
    assert box.names == ("embed", "mlp")
    assert box.init == uniform(16)
    assert parameter_names(boxed())["second"] == {"kernel": ("embed", "mlp"), "bias": ("mlp",)}


def test_a_parameter_without_a_name_for_each_dimension_is_a_mistake() -> None:
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self) -> jax.Array:
            return parameter(self, "kernel", zeros, (2, 3), ("embed",), Runtime())

    with pytest.raises(AssertionError):
        Wrong().init(jax.random.key(0))


def test_parameters_are_stored_in_weights_dtype_and_used_in_dtype() -> None:
    runtime = Runtime(dtype=jnp.float32, weights_dtype=jnp.bfloat16)
    layer = Dense(features=(4,), names=("embed", "mlp"), runtime=runtime)
    params = nn.unbox(layer.init(jax.random.key(0), jnp.ones((1, 3))))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert layer.apply(params, jnp.ones((1, 3))).dtype == jnp.float32


def test_uniform_has_the_variance_of_its_fan_in() -> None:
    values = np.asarray(uniform(50, gain=2.0)(jax.random.key(0), (1 << 16,), jnp.float32), np.float64)
    # The variance of 65536 uniform draws is known to 0.35 %: five standard deviations.
    assert values.var() == pytest.approx(4 / 50, rel=5 * np.sqrt(0.8 / (1 << 16)))
    assert np.abs(values).max() <= Uniform(2 * np.sqrt(3 / 50)).bound


def test_equal_layers_get_different_values_and_equal_keys_equal_ones() -> None:
    first = initial_values(boxed(), jax.random.key(0), Layout())
    again = initial_values(boxed(), jax.random.key(0), Layout())
    other = initial_values(boxed(), jax.random.key(1), Layout())
    kernels = [np.asarray(tree[name]["kernel"]) for tree in (first, other) for name in ("first", "second")]
    for i, a in enumerate(kernels):
        assert all(np.abs(a - b).max() > 0.1 for b in kernels[i + 1 :])
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.asarray(first["first"]["bias"]).any()


def test_a_legacy_key_gives_the_values_of_the_new_one() -> None:
    new, old = (initial_values(boxed(), key, Layout()) for key in (jax.random.key(7), jax.random.PRNGKey(7)))
    jax.tree.map(np.testing.assert_array_equal, new, old)


def test_each_device_makes_its_own_share_only(devices: np.ndarray) -> None:
    layout = Layout.of(Mesh(devices, ("fsdp",)))
    shape = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    sharding = layout.shardings(shape, ("embed", "mlp"))
    draw = drawing(Uniform(0.1), shape.shape, shape.dtype, sharding)
    memory = draw.lower(weights_key(jax.random.key(0)), jnp.zeros(2, jnp.uint32)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 512 * 256 * 4 // 8
    assert memory.temp_size_in_bytes < 1024  # scalars of the key, no array


def test_constant_and_lead_axes() -> None:
    value = Constant(2.0)(jax.random.key(0), (3,), jnp.bfloat16)
    assert value.dtype == jnp.bfloat16
    assert lead_axes(value, 4).shape == (1, 1, 1, 3)
    assert float(value.sum()) == 6.0
