"""Ring attention against the reference, forward and backward, and what it sends."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, Result
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT, dot_product_attention
from maxdiffusion.kernels.attention.ring import merge
from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec
from tests.kernels.attention.cases import (
    F32_LIMIT,
    arrays,
    collectives,
    errors,
    layout_of,
    on_mesh,
    sequence,
    with_grads,
)

_RING = AttentionSpec(context="ring")
_FLASH = AttentionSpec(
    kernel="flash", flash_min_seq_length=0, block_sizes=BlockSizes(block_q=16, block_k=16), context="ring"
)


@pytest.mark.parametrize(
    ("sizes", "length", "spec"),
    [
        ({"context": 2}, 126, _FLASH),
        ({"context": 4}, 13, _RING),
        ({"context": 4, "tensor": 2}, 126, _RING),
        ({"data": 2, "context": 4}, 16, _FLASH),
        ({"context": 8}, 16, _RING),
    ],
    ids=["2-flash", "4-padded", "4-tensor", "4-data-flash", "8"],
)
def test_equals_the_reference(devices: np.ndarray, sizes: dict[str, int], length: int, spec: AttentionSpec) -> None:
    """Values and gradients, with holes in the mask and a row that sees no key, also where parts are padded."""
    args, mask, wanted = sequence(length, length)
    found, text = on_mesh(layout_of(devices, **sizes), args, mask, spec)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)
    for array in found:
        assert np.all(np.isfinite(array)) and np.all(np.asarray(array[-1]) == 0.0)
    assert collectives(text)["all-to-all"] == 0


def test_keys_go_round_once_and_gradients_come_home(devices: np.ndarray) -> None:
    """n-1 permutes each of k and v, the same again backward, n each of dk and dv; nothing is gathered."""
    args, _, _ = sequence(16, 16)
    layout = layout_of(devices, data=2, context=4)
    found, text = on_mesh(layout, args, None, _RING)
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 4, 2, 8)
    assert collectives(text) == {"collective-permute": 2 * 3 + 2 * 3 + 2 * 4}
    assert max(errors(found, jax.jit(with_grads(dot_product_attention))(*args))) <= F32_LIMIT
    placed = [jax.device_put(x, found[0].sharding) for x in args[:3]]
    forward = jax.jit(lambda q, k, v: attention(q, k, v, spec=_RING, layout=layout)).lower(*placed).compile()
    assert collectives(forward.as_text()) == {"collective-permute": 2 * 3}


def test_a_mask_travels_with_its_keys(devices: np.ndarray) -> None:
    """Three further permutes each way, of one byte a key."""
    args, mask, _ = sequence(16, 16)
    _, text = on_mesh(layout_of(devices, data=2, context=4), args, mask, _RING)
    assert collectives(text) == {"collective-permute": 2 * 3 + 2 * 3 + 2 * 4 + 2 * 3}


def test_keys_of_another_length_go_round_where_the_rules_lay_them_beside_the_queries(devices: np.ndarray) -> None:
    args, mask, wanted = sequence(13, 30)
    layout = layout_of(devices, [("activation_kv_length", "context")], context=4)
    found, text = on_mesh(layout, args, mask, _RING)
    assert max(errors(found, wanted)) <= F32_LIMIT
    assert collectives(text)["collective-permute"] == 26


def test_bfloat16_merges_in_float32(devices: np.ndarray) -> None:
    """Parts and gradients are rounded once, by up to 2^-8 each; a bfloat16 log-sum-exp would add 2^-8 a step."""
    args, mask, _ = sequence(16, 16, dtype="bfloat16")
    exact = with_grads(dot_product_attention, mask)(*(x.astype(jnp.float32) for x in args))
    found, text = on_mesh(layout_of(devices, context=4), args, mask, _RING)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert max(errors(found, exact)) <= 2 * 2.0**-8
    assert "bf16[2,4,2]" not in text


def test_under_remat_and_scan_inside_a_manual_axis(devices: np.ndarray) -> None:
    """Two layers that share their arrays, scanned and rematerialised, in a caller's own shard_map over `stage`."""
    args, mask, _ = sequence(16, 16)
    layout = layout_of(devices, stage=2, context=4)

    def twice(fn, q, k, v):
        @jax.checkpoint
        def layer(x, _):
            return fn(x, k, v), None

        return jax.lax.scan(layer, q, None, length=2)[0]

    def grads(fn):
        def run(q, k, v, d_out):
            out, pull = jax.vjp(functools.partial(twice, fn), q, k, v)
            return (out, *pull(d_out))

        return run

    ring = grads(functools.partial(attention, mask=mask, spec=_RING, layout=layout))
    replicated = PartitionSpec()
    staged = jax.shard_map(
        ring, mesh=layout.mesh, in_specs=replicated, out_specs=replicated, axis_names={"stage"}, check_vma=False
    )
    found = jax.jit(staged)(*args)
    wanted = jax.jit(grads(functools.partial(dot_product_attention, mask=mask)))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT


@pytest.mark.parametrize("length", [16, 13])
def test_arrays_of_an_explicit_mesh(devices: np.ndarray, length: int) -> None:
    """Cut by the caller where the length divides; padded by us where it does not."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    args, mask, wanted = sequence(length, length)
    spec = PartitionSpec("data", "context" if length == 16 else None)
    *placed, placed_mask = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (*args[:3], mask))
    layout = Layout.of(mesh)
    found = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask, spec=_RING, layout=layout))(
        *placed, placed_mask
    )
    assert errors((found,), wanted[:1]) <= [F32_LIMIT]


def _halves(scale: float) -> tuple[Result, Result, jax.Array]:
    """Results for the halves of 20 keys, of which the second half has larger scores; and the output for all."""
    q, k, v, _ = arrays((1, 6, 2, 8), 20)
    k = k.at[:, 10:].multiply(scale)
    blocks = BlockSizes(block_q=6, block_k=10)
    parts = [DOT_PRODUCT.forward(Inputs(q, k[:, at], v[:, at]), blocks, None) for at in (slice(10), slice(10, 20))]
    return parts[0], parts[1], dot_product_attention(q, k, v)


def test_merging_is_by_log_sum_exp_and_averaging_is_wrong() -> None:
    a, b, whole = _halves(4.0)
    assert errors((merge(a, b).out,), (whole,)) < [1e-6]
    assert errors(((a.out + b.out) / 2,), (whole,)) > [0.1]
    rounded = [part._replace(lse=part.lse.astype(jnp.bfloat16).astype(jnp.float32)) for part in (a, b)]
    assert errors((merge(*rounded).out,), (whole,)) > [1e-4]  # why the log-sum-exp is float32


def test_merging_with_what_saw_no_key() -> None:
    a, _, _ = _halves(1.0)
    nothing = Result(jnp.zeros_like(a.out), jnp.full_like(a.lse, EMPTY_LSE))
    for merged in (merge(a, nothing), merge(nothing, a)):
        assert np.array_equal(merged.out, a.out) and np.array_equal(merged.lse, a.lse)
    neither = merge(nothing, nothing)
    assert np.all(np.asarray(neither.out) == 0.0) and np.all(np.asarray(neither.lse) == np.float32(EMPTY_LSE))
