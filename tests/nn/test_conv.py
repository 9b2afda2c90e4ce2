"""Convolutions against the sum that defines them, in float64."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.nn.conv import Conv
from maxdiffusion.runtime import Runtime


def by_definition(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    size, pad = kernel.shape[0], (kernel.shape[0] - 1) // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows = range(0, padded.shape[1] - size + 1, stride)
    columns = range(0, padded.shape[2] - size + 1, stride)
    patches = [[padded[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("ijbklc,klcd->bijd", np.asarray(patches), kernel)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 1), (5, 1)])
def test_conv_is_its_definition(size: int, stride: int) -> None:
    layer = Conv(features=4, size=size, stride=stride, runtime=Runtime(precision=jax.lax.Precision.HIGHEST))
    x = jax.random.normal(jax.random.key(1), (2, 7, 6, 3))
    params = nn.unbox(layer.init(jax.random.key(0), x))
    params["params"]["bias"] = jnp.arange(4.0)
    kernel = np.asarray(params["params"]["kernel"], np.float64)
    expected = by_definition(np.asarray(x, np.float64), kernel, stride) + np.arange(4.0)
    np.testing.assert_allclose(layer.apply(params, x), expected, rtol=1e-5, atol=1e-5)  # float32 sums of 75 terms


def test_conv_names_its_channels_and_not_its_kernel() -> None:
    params = Conv(features=4, runtime=Runtime()).init(jax.random.key(0), jnp.ones((1, 2, 2, 3)))["params"]
    assert params["kernel"].names == (None, None, "conv_in", "conv_out")
    assert params["bias"].names == ("conv_out",)
