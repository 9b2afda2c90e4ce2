"""A permute goes from place to place of an array, in whatever order a rule names the axes that cut it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.parallel.collectives import permute
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.pipeline import pipeline, plan
from maxdiffusion.specs import AttentionSpec, PipelineSpec


@pytest.mark.parametrize("axes", [("b",), *itertools.permutations("ac"), *itertools.permutations("abc")], ids="".join)
def test_parts_move_by_their_place_in_the_array(axes: tuple[str, ...], devices: np.ndarray) -> None:
    """Exact: whole numbers are moved."""
    mesh = Mesh(devices.reshape(2, 2, 2), tuple("abc"))
    size = 2 ** len(axes)
    hops = [(place, place + 1) for place in range(size - 1)]
    move = jax.shard_map(lambda x: permute(x, axes, hops), mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    np.testing.assert_array_equal(jax.jit(move)(1 + jnp.arange(size)), np.arange(size))


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
def test_stages_may_lie_in_another_order_than_the_mesh(schedule: str, devices: np.ndarray) -> None:
    """Exact: a layer writes its number behind the digits of a sample."""
    mesh = Mesh(devices[:4].reshape(2, 2), ("a", "b"))
    layout = Layout.of(mesh, (("layers", ("b", "a")), ("activation_batch", None)))
    wanted = plan(layout, PipelineSpec(schedule=schedule), num_layers=8, batch=2, name=schedule)  # pyright: ignore[reportArgumentType]

    def layer(digit: jax.Array, x: jax.Array, _: tuple[()]) -> jax.Array:
        return x * 10 + digit

    out = jax.jit(lambda x: pipeline(layer, 1 + jnp.arange(8), x, (), plan=wanted, layout=layout))(jnp.arange(2))
    np.testing.assert_array_equal(out, [12345678, 112345678])


@pytest.mark.parametrize("context", ["ring", "ulysses", "hybrid"])
def test_a_sequence_may_lie_in_another_order_than_the_mesh(context: str, devices: np.ndarray) -> None:
    """Masked, so that every key meets its own mask. Float32 sums of 16 terms in another order."""
    layout = Layout.of(Mesh(devices[:4].reshape(2, 2), ("a", "b")), (("activation_length", ("b", "a")),))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
    mask = (jnp.arange(16) % 3 != 1)[None]

    def run(layout: Layout, spec: AttentionSpec) -> jax.Array:
        call = jax.jit(
            lambda q, k, v, mask: attention(q, k, v, mask=mask, spec=spec, layout=layout, precision="highest")
        )
        return call(q, k, v, mask)

    out = run(layout, AttentionSpec(context=context))  # pyright: ignore[reportArgumentType]
    expected = run(Layout.of(None), AttentionSpec())
    assert float(jnp.abs(out - expected).max()) <= 1e-6 * float(jnp.abs(expected).max())
