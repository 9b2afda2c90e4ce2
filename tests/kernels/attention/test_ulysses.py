"""Ulysses attention, alone and with a ring across groups, against the reference; and what it sends."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.reference import dot_product_attention
from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.kernels.attention.ulysses import Groups
from maxdiffusion.specs import AttentionSpec
from tests.kernels.attention.cases import F32_LIMIT, collectives, errors, layout_of, on_mesh, sequence, with_grads

_ULYSSES = AttentionSpec(context="ulysses")
_FLASH = AttentionSpec(
    kernel="flash", flash_min_seq_length=0, block_sizes=BlockSizes(block_q=16, block_k=16), context="ulysses"
)
_HYBRID = AttentionSpec(context="hybrid", ulysses=2)
_GRID = [("activation_length", ("rings", "swaps"))]


@pytest.mark.parametrize(
    ("sizes", "length", "heads", "spec"),
    [
        ({"context": 2}, 126, 2, _FLASH),
        ({"context": 4}, 13, 4, _ULYSSES),
        ({"context": 2, "tensor": 2}, 16, 4, _ULYSSES),
        ({"data": 2, "context": 4}, 16, 4, _ULYSSES),
        ({"context": 8}, 126, 2, _HYBRID),
        ({"context": 4, "tensor": 2}, 13, 4, _HYBRID),
        ({"rings": 2, "swaps": 2}, 13, 2, AttentionSpec(context="hybrid")),
        ({"context": 4}, 126, 2, replace(_FLASH, context="hybrid")),
    ],
    ids=[
        "2-flash",
        "4-padded",
        "2-tensor",
        "4-data",
        "hybrid-8",
        "hybrid-4-tensor",
        "hybrid-of-two-axes",
        "hybrid-flash",
    ],
)
def test_equals_the_reference(
    devices: np.ndarray, sizes: dict[str, int], length: int, heads: int, spec: AttentionSpec
) -> None:
    """Values and gradients; the mask has holes that differ on each device, and hides all keys of one row."""
    args, mask, wanted = sequence(length, length, heads)
    layout = layout_of(devices, _GRID if "rings" in sizes else None, **sizes)
    found, text = on_mesh(layout, args, mask, spec)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)
    for array in found:
        assert np.all(np.isfinite(array)) and np.all(np.asarray(array[-1]) == 0.0)
    assert ("collective-permute" in text) == (spec.context == "hybrid")


def test_every_token_is_as_exact_as_the_others(devices: np.ndarray) -> None:
    """13 tokens on four devices: a padded key that were seen would spoil all, a lost token the last ones."""
    args, _, _ = sequence(13, 13, 4)
    wanted = dot_product_attention(*args[:3])
    layout = layout_of(devices, context=4)
    found = jax.jit(lambda q, k, v: attention(q, k, v, spec=_ULYSSES, layout=layout))(*args[:3])
    assert found.shape == wanted.shape
    per_token = np.abs(np.asarray(found - wanted)).max(axis=(0, 2, 3))
    assert per_token.max() <= F32_LIMIT


def test_four_all_to_alls_each_way_and_nothing_is_gathered(devices: np.ndarray) -> None:
    args, _, _ = sequence(16, 16, 4)
    layout = layout_of(devices, data=2, context=4)
    found, text = on_mesh(layout, args, None, _ULYSSES)
    assert collectives(text) == {"all-to-all": 8}
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 4, 4, 8)
    assert max(errors(found, jax.jit(with_grads(dot_product_attention))(*args))) <= F32_LIMIT
    placed = [jax.device_put(x, found[0].sharding) for x in args[:3]]
    forward = jax.jit(lambda q, k, v: attention(q, k, v, spec=_ULYSSES, layout=layout)).lower(*placed).compile()
    assert collectives(forward.as_text()) == {"all-to-all": 4}


def test_a_hybrid_swaps_in_groups_and_sends_round_across_them(devices: np.ndarray) -> None:
    """Ulysses 2 x ring 2 on four devices: each ring has one hop, two home."""
    args, _, _ = sequence(16, 16, 2)
    _, text = on_mesh(layout_of(devices, context=4), args, None, _HYBRID)
    found = collectives(text)
    assert found["all-to-all"] == 8 and set(found) == {"all-to-all", "collective-permute"}
    # one hop of k and v each forward, the same backward (found equal by XLA on CPUs), two of dk and dv
    assert found["collective-permute"] in (2 + 4, 2 + 2 + 4)


def test_groups_are_neighbours() -> None:
    groups = Groups(axes=("context",), devices=8, degree=4)
    assert groups.index_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Groups(axes=("context",), devices=8, degree=8).index_groups is None
