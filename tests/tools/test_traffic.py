"""Collectives are read from compiled text: kinds, bytes, trips of loops, mesh axes; and what data parallelism moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
  %e = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,3},{1,2},{4,7},{5,6}}, to_apply=%add
  ROOT %z = f32[4,8]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501  (the text is what a compiler prints)


def test_text_is_read(data_model: Mesh) -> None:
    """Groups of a swap may be a part of those of an axis (half of a ring); a sum of such a part is along no axes."""

    def one(kind: str, axes: tuple[str, ...], *sizes: int, count: int = 1) -> Collective:
        return Collective(kind=kind, axes=axes, tensors=sizes, count=count)

    found = traffic(TEXT, data_model)
    assert found.collectives == (
        one("collective-permute", ("data",), 4 * 8 * 4, count=3),
        one("all-gather", ("model",), 8 * 8 * 2),
        one("all-reduce", ("data",), 4 * 8 * 4, 2 * 4),
        one("reduce-scatter", ("data",), 4 * 8 * 4),
        one("all-reduce", ("model",), 4 * 8 * 4),
        one("all-reduce", ("model",), 4 * 8 * 4),
        one("all-to-all", ("data", "model"), 4 * 8 * 4),
        one("all-reduce", (), 4 * 8 * 4),
    )
    assert found.bytes("collective-permute") == 3 * 128 and found.count("all-reduce", ["model"]) == 2
    assert found.table()[0] == ("collective-permute", "data", 3, 384)
    assert found.collectives[2].bytes == 136
    assert found.bytes("all-reduce", ["data"], above=8) == 128 and found.count("all-reduce", ["data"], above=128) == 0


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


def test_trips_are_read_from_a_condition_too(data_model: Mesh) -> None:
    """As TPU compilers write them; sums of which each device keeps a part stand in a computation of that name."""
    loop = TEXT.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    assert traffic(loop, data_model).collectives[0].in_loop_of_unknown_length
    limit = "%n = s32[]{:T(128)} constant(5)\n  ROOT %l = pred[] compare(%i, %n), direction=LT"
    assert traffic(loop.replace("ROOT %l = pred[] constant(true)", limit), data_model).collectives[0].count == 5
    scattered = TEXT.replace("%looped", "%all-reduce-scatter.1").replace("collective-permute(%x)", "all-reduce(%x)")
    scattered = scattered.replace(
        "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", "replica_groups=[4,2]<=[8]"
    )
    assert traffic(scattered, data_model).collectives[0].kind == "reduce-scatter"
