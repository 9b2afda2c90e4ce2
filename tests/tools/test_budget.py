"""The formulas of each strategy, against sums made by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import (
    Exchange,
    Parameter,
    budget,
    data_parallel,
    fully_sharded,
    ring,
    tensor_parallel,
    ulysses,
)
from maxdiffusion.tools.measure import SIZES, twin


def totals(exchanges: object) -> dict[tuple[str, str], tuple[int, int]]:
    """Number and bytes of each kind and its axes."""
    count, size = Counter(), Counter()
    for one in exchanges:  # type: ignore[attr-defined]
        assert isinstance(one, Exchange)
        key = one.kinds[0], "+".join(one.axes)
        count[key] += one.count
        size[key] += one.count * one.bytes
    return {key: (count[key], size[key]) for key in count}


def parameter(size: int, *gathered: str, layers: int = 1) -> Parameter:
    return Parameter(bytes=size, layers=layers, again=layers > 1, gathered=gathered, of_tokens=True)


def of_flux(mesh: str, **keywords: str) -> dict[tuple[str, str], tuple[int, int]]:
    """The whole budget; FLUX.1's twin is 64 wide, 2 + 2 blocks, 64 + 32 tokens, 16 samples."""
    return totals(budget(twin("flux-dev", build_mesh(MeshSpec.parse(mesh)), keywords), **SIZES))


def test_data_parallelism_sums_each_gradient() -> None:
    assert totals(data_parallel([parameter(100), parameter(20, layers=3)], ("data",))) == {
        ("all-reduce", "data"): (4, 160)
    }


def test_fsdp_gathers_blocks_twice() -> None:
    """A block's parameter forward and backward, what lies outside once; replicas then sum a quarter of a gradient."""
    layout = Layout.of(build_mesh(MeshSpec.parse("data=2,fsdp=4")))
    found = totals(fully_sharded([parameter(100, "fsdp"), parameter(40, "fsdp", layers=2)], ("data", "fsdp"), layout))
    assert found == {
        ("all-gather", "fsdp"): (5, 100 + 2 * 2 * 40),
        ("reduce-scatter", "fsdp"): (3, 180),
        ("all-reduce", "data"): (3, 45),
    }


def test_rings_and_swaps_of_one_attention() -> None:
    of_ring = Plan(strategy="ring", axes=("context",), parts=4, ring=4, heads=8, batch=1)
    assert totals(ring(of_ring, 10)) == {("collective-permute", "context"): (6 + 6 + 8, 200)}
    swap = Plan(strategy="ulysses", axes=("context",), parts=4, ulysses=4, heads=8, batch=1)
    assert totals(ulysses(swap, 10)) == {("all-to-all", "context"): (8, 80)}


def test_a_block_of_two_regions_sums_four_times() -> None:
    assert totals(tensor_parallel(("tensor",), [10, 10])) == {("all-reduce", "tensor"): (4, 40)}


def test_flux_s_tokens() -> None:
    """A device's tokens: 8 samples, 96 tokens, 64 channels of 4 bytes, 196,608 bytes; a quarter where 4 share them."""
    tokens, condition = 8 * 96 * 64 * 4, 8 * 64 * 4
    found = of_flux("data=2,tensor=4")
    # Two blocks with two regions of two streams and two with one of both; the condition of 4 + 2 + 1 modulations
    assert found["all-reduce", "tensor"] == (2 * 8 + 2 * 2 + 7, 12 * tokens + 7 * condition)
    assert of_flux("data=2,context=4", context_attention="ring")["collective-permute", "context"] == (80, 20 * tokens)
    assert of_flux("data=2,context=4", context_attention="ulysses")["all-to-all", "context"] == (32, 8 * tokens)


def test_a_pipeline_moves_a_microbatch_a_tick() -> None:
    """4 samples a device in 4 microbatches over 2 stages are 5 ticks; both streams of the first stack are moved."""
    found = of_flux("stage=2,data=4")
    tokens = 4 * 96 * 64 * 4
    assert found["collective-permute", "stage"] == (3 * 2 * 5, 2 * 2 * 5 * tokens // 4)
    assert found["all-reduce", "stage"] == (3 * 2, 2 * 2 * tokens)


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(UsageError, match="one of tensor, context and stage"):
        of_flux("tensor=2,context=4")
    with pytest.raises(UsageError, match="not for 'tensor'"):
        budget(twin("sd15", build_mesh(MeshSpec.parse("tensor=2,data=4")), {}), **SIZES)
    with pytest.raises(UsageError, match="12 samples do not divide by the 8 devices that share them"):
        budget(twin("flux-dev", build_mesh(MeshSpec.parse("data=8")), {}), **{**SIZES, "batch": 12})
    with pytest.raises(UsageError, match="4 heads do not divide by tensor=8, for which there is no formula"):
        budget(twin("flux-dev", build_mesh(MeshSpec.parse("tensor=8")), {"num_attention_heads": 4}), **SIZES)
    with pytest.raises(UsageError, match="2 layers do not divide by stage=4, so every stage has them all"):
        of_flux("stage=4,data=2")
