"""Convolutions against the sum that defines them, in float64."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.nn.conv import Conv, conv_calls
from maxdiffusion.runtime import Runtime


def by_definition(x: np.ndarray, kernel: np.ndarray, stride: int, padding: tuple[int, int] | None) -> np.ndarray:
    size = kernel.shape[0]
    zeros = padding or ((size - 1) // 2,) * 2
    padded = np.pad(x, ((0, 0), zeros, zeros, (0, 0)))
    rows = range(0, padded.shape[1] - size + 1, stride)
    columns = range(0, padded.shape[2] - size + 1, stride)
    patches = [[padded[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("ijbklc,klcd->bijd", np.asarray(patches), kernel)


@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    # The last is the halving of autoencoders: zeros behind the picture only.
    [(3, 1, None), (3, 2, None), (1, 1, None), (5, 1, None), (3, 2, (0, 1))],
)
def test_conv_is_its_definition(size: int, stride: int, padding: tuple[int, int] | None) -> None:
    runtime = Runtime(precision=jax.lax.Precision.HIGHEST)
    layer = Conv(features=4, size=size, stride=stride, padding=padding, runtime=runtime)
    x = jax.random.normal(jax.random.key(1), (2, 7, 6, 3))
    params = nn.unbox(layer.init(jax.random.key(0), x))
    params["params"]["bias"] = jnp.arange(4.0)
    kernel = np.asarray(params["params"]["kernel"], np.float64)
    expected = by_definition(np.asarray(x, np.float64), kernel, stride, padding) + np.arange(4.0)
    np.testing.assert_allclose(layer.apply(params, x), expected, rtol=1e-5, atol=1e-5)  # float32 sums of 75 terms


def test_conv_names_its_channels_and_not_its_kernel() -> None:
    params = Conv(features=4, runtime=Runtime()).init(jax.random.key(0), jnp.ones((1, 2, 2, 3)))["params"]
    assert params["kernel"].names == (None, None, "conv_in", "conv_out")
    assert params["bias"].names == ("conv_out",)


def test_calls_are_listed_with_their_feature_maps() -> None:
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = Conv(features=4, stride=2, runtime=Runtime(), name="down")(x)
            return Conv(features=5, size=1, runtime=Runtime(), name="out")(x)

    x = jax.ShapeDtypeStruct((1, 8, 6, 3), jnp.float32)
    calls = conv_calls(lambda x: Pair().init(jax.random.key(0), x), x)
    assert [(path, shape, layer.features) for path, shape, layer in calls] == [
        ("down", (1, 8, 6, 3), 4),
        ("out", (1, 4, 3, 4), 5),
    ]
