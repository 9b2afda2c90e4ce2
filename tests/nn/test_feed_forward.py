"""The feed-forward network, gated or not, against its formula, and its pairs under tensor parallelism."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.nn.feed_forward import FeedForward
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime

HIGHEST = jax.lax.Precision.HIGHEST


def test_geglu_is_its_formula() -> None:
    layer = FeedForward(runtime=Runtime(precision=HIGHEST))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    params = nn.unbox(layer.init(jax.random.key(0), x))
    pair = np.asarray(params["params"]["net_0"]["proj"]["kernel"], np.float64)
    out = np.asarray(params["params"]["net_2"]["kernel"], np.float64)
    assert pair.shape == (4, 2, 16)
    hidden, gate = np.moveaxis(np.einsum("bli,ipm->blpm", np.asarray(x, np.float64), pair), 2, 0)
    gelu = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    np.testing.assert_allclose(layer.apply(params, x), (hidden * gelu) @ out, rtol=1e-5, atol=1e-5)


def test_gelu_is_its_formula() -> None:
    layer = FeedForward(hidden="gelu-approximate", multiple=3, runtime=Runtime(precision=HIGHEST))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    params = nn.unbox(layer.init(jax.random.key(0), x))
    kernel = np.asarray(params["params"]["net_0"]["proj"]["kernel"], np.float64)
    hidden = np.asarray(x, np.float64) @ kernel
    assert hidden.shape == (2, 3, 12)
    gelu = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    out = np.asarray(params["params"]["net_2"]["kernel"], np.float64)
    np.testing.assert_allclose(layer.apply(params, x), gelu @ out, rtol=1e-5, atol=1e-5)


def test_tensor_parallelism_moves_no_hidden_unit(devices: np.ndarray) -> None:
    """A unit and its gate live on one device: the only exchange is the sum at the end."""
    layout = Layout.of(Mesh(devices, ("tensor",)))
    layer = FeedForward(runtime=Runtime(layout=layout, precision=HIGHEST))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    single = FeedForward(runtime=Runtime(precision=HIGHEST))
    params = nn.unbox(single.init(jax.random.key(0), x))
    names = {
        "net_0": {"proj": {"kernel": ("embed", None, "mlp"), "bias": (None, "mlp")}},
        "net_2": {"kernel": ("mlp", "embed"), "bias": ("embed",)},
    }
    sharded = jax.device_put(params, {"params": layout.shardings(params["params"], names)})
    compiled = jax.jit(layer.apply).lower(sharded, x).compile()
    np.testing.assert_allclose(compiled(sharded, x), single.apply(params, x), rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    assert text.count(" all-reduce(") == 1
    assert text.count(" all-to-all(") == text.count(" collective-permute(") == 0
    kernel = sharded["params"]["net_0"]["proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (8, 2, 4)
    assert jnp.isfinite(kernel).all()
