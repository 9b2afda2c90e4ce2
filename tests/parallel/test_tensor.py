"""Several products of one stream, and several that add up: one device's numbers, and one sum over the devices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.parallel.tensor import fan_in, fan_out
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.traffic import traffic

OUT = [("embed", "heads", "kv"), ("embed", "mlp")]
IN = [("heads", "kv", "embed"), ("mlp", "embed")]
B, L, W, H, D, M = 4, 6, 8, 4, 3, 16


def product(x: jax.Array, kernel: jax.Array, *, inputs: int) -> jax.Array:
    contracted = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())), precision="highest")


def loss(layout: Layout, weights: Any, x: jax.Array) -> jax.Array:
    """Both ways: what heads and units read, and what they add up to."""
    used = jax.tree.map(lambda w, names: layout.use(w, *names), weights, [OUT, IN], is_leaf=_is_array)
    ys = fan_out(layout, functools.partial(product, inputs=1), x, used[0], OUT)
    ys = [jnp.tanh(y) for y in ys]
    y = fan_in(layout, lambda y, w: product(y, w, inputs=w.ndim - 1), ys, used[1], IN)
    return jnp.mean(jnp.square(layout.constrain(y, "activation_batch", "activation_length", "activation_embed")))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array)


def arrays(heads: int) -> tuple[Any, jax.Array]:
    random = np.random.default_rng(0)
    shapes = [[(W, heads, D), (W, M)], [(heads, D, W), (M, W)]]
    weights = [[jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in pair] for pair in shapes]
    return weights, jnp.asarray(random.standard_normal((B, L, W)), jnp.float32)


@pytest.mark.parametrize(
    ("mesh", "heads"),
    [("data=2,tensor=4", H), ("data=2,tensor=4", 3), ("fsdp=2,tensor=4", H), ("tensor=2,context=2,data=2", H)],
)
def test_numbers_and_gradients_are_those_of_one_device(mesh: str, heads: int, devices: np.ndarray) -> None:
    """Sums of at most 48 float32 products in another order: a few units of the last place, 1e-6 after squares."""
    weights, x = arrays(heads)
    layout = Layout.of(build_mesh(MeshSpec.parse(mesh), list(devices.flat)))
    step = jax.jit(jax.value_and_grad(functools.partial(loss, layout), argnums=(0, 1)))
    found = step(weights, jax.device_put(x, layout.rows(B)))
    wanted = jax.value_and_grad(functools.partial(loss, Layout.of(None)), argnums=(0, 1))(weights, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-6 * max(np.abs(np.asarray(b)).max(), 1e-3)


def test_devices_sum_once_each_way(devices: np.ndarray) -> None:
    """Forward the tokens that come out, backward the gradient of those that go in: two, for four products."""
    weights, x = arrays(H)
    layout = Layout.of(build_mesh(MeshSpec.parse("data=2,tensor=4"), list(devices.flat)))
    places = [
        [layout.sharding(*n, shape=w.shape) for w, n in zip(*pair, strict=True)]
        for pair in zip(weights, [OUT, IN], strict=True)
    ]
    weights = jax.device_put(weights, places)
    step = jax.jit(jax.grad(functools.partial(loss, layout), argnums=(0, 1)), out_shardings=(places, layout.rows(B)))
    text = step.lower(weights, jax.device_put(x, layout.rows(B))).compile().as_text() or ""
    assert isinstance(layout.mesh, jax.sharding.Mesh)
    found = traffic(text, layout.mesh)
    tokens = B // 2 * L * W * 4
    assert [one.tensors for one in found.collectives if one.axes == ("tensor",)] == [(tokens,), (tokens,)]
    cut = sum(math.prod(w.shape) for w in jax.tree.leaves(weights))
    assert found.bytes("all-reduce", ["data"], above=4) == cut  # 4 bytes each, a quarter on each device


@pytest.mark.parametrize("manual", [("tensor",), ("data", "tensor")], ids=",".join)
def test_inside_a_user_s_shard_map_a_device_has_whole_kernels(manual: tuple[str, ...], devices: np.ndarray) -> None:
    """The caller has cut the batch over the axis of the kernels: nothing is left to sum over it."""
    weights, x = arrays(H)
    x = jnp.concatenate([x, 2 * x])
    layout = Layout.of(build_mesh(MeshSpec.parse("data=2,tensor=4"), list(devices.flat)))
    assert isinstance(layout.mesh, jax.sharding.Mesh)
    cut = P(("tensor",))

    def body(weights: Any, x: jax.Array) -> jax.Array:
        return loss(layout, weights, x)[None]

    call = jax.shard_map(
        body, mesh=layout.mesh, in_specs=(P(), cut), out_specs=cut, axis_names=set(manual), check_vma=False
    )
    found = jax.jit(lambda weights, x: jnp.mean(call(weights, x)))(weights, x)
    wanted = loss(Layout.of(None), weights, x)
    assert abs(float(found - wanted)) <= 1e-6 * abs(float(wanted))
