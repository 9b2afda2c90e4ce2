"""Collectives are read from compiled text: kinds, bytes, trips of loops, mesh axes; and what data parallelism moves."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.models.registry import lookup
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.traffic import Collective, traffic

TEXT = """HloModule test

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%looped (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %n = f32[4,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %n)
}

%cond (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %l = pred[] constant(true)
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = (s32[], f32[4,8]{1,0}) while(%t0), condition=%cond, body=%looped, backend_config={"known_trip_count":{"n":"3"}}
  %g = bf16[8,8]{1,0:T(8,128)} all-gather(%x), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}
  %r = (f32[4,8]{1,0}, /*index=1*/f32[2]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %s = f32[1,8]{1,0} reduce-scatter(%x), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add
  %q = f32[4,8]{1,0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, to_apply=%add
  %h = f32[4,8]{1,0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(4)2}, to_apply=%add
  %o = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %v = f32[4,8]{1,0} all-to-all(%x), replica_groups={{0,3},{1,2},{4,7},{5,6}}
  ROOT %z = f32[4,8]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501  (the text is what a compiler prints)


def test_text_is_read(data_model: Mesh) -> None:
    def one(kind: str, axes: tuple[str, ...], size: int, count: int = 1) -> Collective:
        return Collective(kind=kind, axes=axes, bytes=size, count=count)

    found = traffic(TEXT, data_model)
    assert found.collectives == (
        one("collective-permute", ("data",), 4 * 8 * 4, 3),
        one("all-gather", ("model",), 8 * 8 * 2),
        one("all-reduce", ("data",), 4 * 8 * 4 + 2 * 4),
        one("reduce-scatter", ("data",), 4 * 8 * 4),
        one("all-reduce", ("model",), 4 * 8 * 4),
        one("all-reduce", ("model",), 4 * 8 * 4),
        one("all-to-all", (), 4 * 8 * 4),
    )
    assert found.bytes("collective-permute") == 3 * 128 and found.count("all-reduce", ["model"]) == 2
    assert found.table()[0] == ("collective-permute", "data", 3, 384)
    assert found.bytes(above=128) == 136


@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_gradient_is_summed_once_over_the_axis_of_the_batch(axis: str, data_model: Mesh) -> None:
    """The bytes of data parallelism's textbook formula: every gradient once, whatever the batch."""
    whole, batch = NamedSharding(data_model, P()), NamedSharding(data_model, P(axis))
    weights = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=batch)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=whole)
    found = traffic(gradient.lower(weights, x).compile().as_text() or "", data_model)
    assert found.table() == [("all-reduce", axis, 1, 64 * 32 * 4)]


def test_a_scan_counts_its_trips(data_model: Mesh) -> None:
    cut = NamedSharding(data_model, P(None, "model", None))
    weights = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32, sharding=cut)
    x = jax.ShapeDtypeStruct((4, 32), jnp.float32, sharding=NamedSharding(data_model, P(None, "model")))

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(data_model, P(None, "model"))), None

    text = jax.jit(lambda w, x: jax.lax.scan(body, x, w)[0]).lower(weights, x).compile().as_text() or ""
    found = traffic(text, data_model)
    assert not any(one.in_loop_of_unknown_length for one in found.collectives)
    assert found.count("all-reduce") == found.count("all-reduce", ["model"]) == 5
    # What a device has of the batch of 4 (or all of it), against half of the columns
    assert found.bytes("all-reduce") in (5 * 4 * 16 * 4, 5 * 4 * 32 * 4)


@pytest.mark.parametrize("axis", [pytest.param("data", marks=pytest.mark.slow), "fsdp"])
def test_flux_moves_what_the_formula_says(axis: str) -> None:
    """Data: every gradient summed once. FSDP: every parameter gathered once (without rematerialisation the backward
    pass keeps it), every gradient summed once: XLA's CPU compiler has no reduce-scatter and sums the whole.
    """
    mesh = build_mesh(MeshSpec.parse(f"{axis}=8"))
    model = lookup("flux-dev").build("tiny", mesh=mesh)
    shapes, names = model.abstract_params()
    shardings = model.layout.shardings(shapes, names)
    total = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(shapes))

    def at(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(at, shapes, shardings)
    inputs = model.call_shapes(8, height=8, width=8, text=8)
    inputs = jax.tree.map(lambda leaf: at(leaf, model.layout.rows(8)), inputs)

    def loss(params: Any, inputs: Any) -> jax.Array:
        return jnp.mean(jnp.square(model.apply({"params": params}, **inputs).sample))  # type: ignore[union-attr]

    text = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, inputs).compile().as_text() or ""
    found = traffic(text, mesh)
    assert found.bytes("all-reduce", [axis]) == total
    gathered = found.bytes("all-gather", [axis])
    assert gathered == 0 if axis == "data" else 0.98 * total <= gathered <= total
    assert {kind for kind, *_ in found.table()} == ({"all-reduce"} if axis == "data" else {"all-reduce", "all-gather"})
