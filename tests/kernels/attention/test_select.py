from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import IndivisibleError, LayoutWarning, UsageError
from maxdiffusion.kernels.attention.reference import dot_product_attention
from maxdiffusion.kernels.attention.select import attention, choose
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec
from tests.kernels.attention.cases import (
    F32_LIMIT,
    arrays,
    collectives,
    errors,
    key_mask,
    layout_of,
    on_mesh,
    sequence,
    with_grads,
)

_FLASH = AttentionSpec(kernel="flash", flash_min_seq_length=0, block_sizes=BlockSizes(block_q=32, block_k=64))
_Q = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


@pytest.fixture
def one(devices: np.ndarray) -> Layout:
    return Layout.of(Mesh(devices[:1], ("data",)))


def _image(length: int) -> tuple[int, int, int, int]:
    return (2, length, 8, 40)


def test_a_full_mask_takes_the_dot_product_kernel(one: Layout) -> None:
    choice = choose(_image(64), _image(64), spec=_FLASH, layout=one, full_mask=True)
    assert choice.kernel == "dot_product" and "full mask of 64 x 64" in choice.reason
    q, k, v, _ = arrays((2, 9, 1, 8), 9)
    causal = jnp.tril(jnp.ones((9, 9), bool))[None, None]
    found = attention(q, k, v, mask=causal, spec=_FLASH, layout=one)
    assert errors((found,), (dot_product_attention(q, k, v, mask=causal),)) <= [F32_LIMIT]


def test_the_same_numbers_on_both_sides_of_the_threshold(one: Layout) -> None:
    args = arrays((2, 64, 2, 40), 64)
    mask = key_mask(2, 64)
    results = []
    for least, kernel in ((64, "flash_cpu"), (65, "dot_product")):
        spec = AttentionSpec(kernel="flash", flash_min_seq_length=least)
        assert choose(args[0].shape, args[1].shape, spec=spec, layout=one).kernel == kernel
        results.append(jax.jit(with_grads(partial(attention, spec=spec, layout=one), mask))(*args))
    assert max(errors(*results)) <= F32_LIMIT


@pytest.mark.parametrize("axes", [("data", "tensor"), ("data", "model")])
@pytest.mark.parametrize("kernel", ["flash", "dot_product"])
def test_each_device_computes_its_own_rows_and_heads(devices: np.ndarray, axes: tuple[str, str], kernel: str) -> None:
    """Equal to one device, forward and backward, and nothing at all is exchanged."""
    args, mask = arrays((4, 70, 2, 8), 90), key_mask(4, 90)
    layout = Layout.of(Mesh(devices.reshape(4, 2), axes))
    spec = AttentionSpec(kernel=kernel, flash_min_seq_length=0, block_sizes=_FLASH.block_sizes)
    found, text = on_mesh(layout, args, mask, spec)
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 70, 1, 8)
    assert not collectives(text)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT


def test_batch_and_heads_that_do_not_divide(data_model: Mesh) -> None:
    args, mask = arrays((3, 40, 3, 8), 40), key_mask(3, 40)
    with pytest.warns(LayoutWarning, match="activation_(batch|heads) of 3 does not divide") as said:
        found, _ = on_mesh(Layout.of(data_model), args, mask, _FLASH)
    assert {str(one.message).split()[0] for one in said} == {"activation_batch", "activation_heads"}
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT
    strict = Layout.of(data_model, strict=True)
    with pytest.raises(IndivisibleError):
        attention(*args[:3], spec=_FLASH, layout=strict)


def test_queries_over_the_sequence_axis_see_all_keys(devices: np.ndarray) -> None:
    args, mask = arrays((2, 64, 1, 8), 90), key_mask(2, 90)
    layout = Layout.of(Mesh(devices.reshape(2, 4), ("data", "context")))
    found, text = on_mesh(layout, args, mask, _FLASH)
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 16, 1, 8)
    assert set(collectives(text)) == {"all-reduce"}  # the gradients of keys and values, from all queries
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT


def test_rules_that_shard_keys_or_head_size_still_give_whole_keys_and_heads(devices: np.ndarray) -> None:
    args, mask = arrays((2, 40, 1, 8), 80), key_mask(2, 80)
    rules = [("activation_kv_length", "context"), ("activation_kv", "tensor"), ("activation_heads", None)]
    layout = Layout.of(Mesh(devices.reshape(2, 2, 2), ("data", "context", "tensor")), rules)
    spec = dataclasses.replace(_FLASH, context="gather")
    choice = choose(args[0].shape, args[1].shape, spec=spec, layout=layout)
    assert "activation_kv is gathered along tensor" in choice.reason
    assert "activation_kv_length is gathered along context" in choice.reason
    found, text = on_mesh(layout, args, mask, spec)
    assert "all-gather" in text
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT


@pytest.mark.parametrize("kernel", ["flash", "dot_product"])
def test_gathered_keys_keep_their_mask(devices: np.ndarray, kernel: str) -> None:
    """One sequence in four parts, of a length that four does not divide."""
    args, mask, wanted = sequence(30, 30)
    spec = dataclasses.replace(_FLASH, kernel=kernel, context="gather")
    found, text = on_mesh(layout_of(devices, context=4), args, mask, spec)
    assert "all-gather" in text
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)


def test_an_explicit_mesh(devices: np.ndarray) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    args = arrays((4, 40, 2, 8), 40)
    layout = Layout.of(mesh)
    spec = layout.spec(*_Q)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args[:3]]
    found = jax.jit(partial(attention, spec=_FLASH, layout=layout))(*placed)
    assert errors((found,), (dot_product_attention(*args[:3]),)) <= [F32_LIMIT]


def test_misfits_are_named_before_anything_runs(one: Layout) -> None:
    q, k, v, _ = arrays((2, 64, 4, 8), 32)
    with pytest.raises(UsageError, match="look swapped"):
        attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), spec=_FLASH, layout=one)
