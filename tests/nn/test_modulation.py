"""Modulation against its formula in float64, its parts under tensor parallelism, and in bfloat16."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.nn.modulation import Modulation, modulate
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime


def test_parts_are_one_product_and_cut_as_units(devices: np.ndarray) -> None:
    runtime = Runtime(layout=Layout.of(Mesh(devices, ("tensor",))), precision=jax.lax.Precision.HIGHEST)
    cond = jax.random.normal(jax.random.key(1), (2, 16))
    params = nn.unbox(Modulation(num_parts=3, runtime=Runtime()).init(jax.random.key(0), cond))
    kernel = np.asarray(params["params"]["linear"]["kernel"], np.float64)
    assert kernel.shape == (16, 3, 16)
    c = np.asarray(cond, np.float64)
    wanted = np.einsum("bi,ipo->pbo", c / (1 + np.exp(-c)), kernel)
    parts = jax.jit(Modulation(num_parts=3, runtime=runtime).apply)(params, cond)
    assert [part.shape for part in parts] == [(2, 1, 16)] * 3
    for part, want in zip(parts, wanted, strict=True):
        np.testing.assert_allclose(part[:, 0], want, rtol=0, atol=1e-5)
    layer = Modulation(num_parts=3, runtime=runtime)
    names = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), cond))["params"]["linear"]["kernel"]
    assert tuple(names) == ("embed", None, "mlp")


def test_modulate_is_its_formula_and_keeps_float32_statistics() -> None:
    x = (100 + jax.random.normal(jax.random.key(1), (2, 5, 12))).astype(jnp.bfloat16)
    shift, scale = jax.random.normal(jax.random.key(2), (2, 2, 1, 12))
    with jax.numpy_dtype_promotion("strict"):
        y = modulate(x, shift, scale)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    exact = normed * (1 + np.asarray(scale, np.float64)) + np.asarray(shift, np.float64)
    # One rounding to 8 bits at the end; bfloat16 statistics at mean 100 would be off by 0.5.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-3)
