"""The formulas of each strategy, against sums made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan
from maxdiffusion.models.flux import DOUBLE_BLOCKS, SINGLE_BLOCKS
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import (
    Exchange,
    Parameter,
    budget,
    channel_parallel,
    convolved,
    data_parallel,
    exchanged,
    fully_sharded,
    ring,
    sequence_parallel,
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


def test_hybrid_and_gathered_keys_of_one_attention() -> None:
    """Four devices in two rings of two; on two axes the outer one is the ring, the inner one swaps."""
    one_axis = Plan(strategy="hybrid", axes=("context",), parts=4, ring=2, ulysses=2, heads=8, batch=1)
    layout = Layout.of(build_mesh(MeshSpec.parse("data=2,context=4")))
    assert totals(exchanged(one_axis, layout, 10, 10)) == {
        ("all-to-all", "context"): (8, 80),
        ("collective-permute", "context"): (2 + 2 + 4, 80),
    }
    grid = MeshSpec(axes=("data", "rings", "swaps"), data=2, rings=2, swaps=2)
    of_two = Layout.of(build_mesh(grid), [("activation_length", ("rings", "swaps"))])
    two_axes = replace(one_axis, axes=("rings", "swaps"))
    assert set(totals(exchanged(two_axes, of_two, 10, 10))) == {
        ("all-to-all", "swaps"),
        ("collective-permute", "rings"),
    }
    gather = Plan(strategy="gather", axes=("context",), parts=4, heads=8, batch=1)
    assert totals(exchanged(gather, layout, 10, 10)) == {
        ("all-gather", "context"): (2, 80),
        ("reduce-scatter", "context"): (2, 80),
    }
    words = Plan(strategy="local", axes=("context",), parts=4, heads=8, batch=1)
    assert totals(exchanged(words, layout, 10, 10)) == {("all-reduce", "context"): (2, 20)}
    assert totals(exchanged(Plan(strategy="local", heads=8, batch=1), layout, 10, 10)) == {}
    # Two devices outside of a loop: the keys of the forward pass are still there
    once = totals(exchanged(one_axis, layout, 10, 10, looped=False))
    assert once["collective-permute", "context"] == (2 + 4, 60)


def test_a_circular_pipeline_moves_its_weights_once_a_call() -> None:
    """4 layers in 2 rounds over 2 stages: a stage stores 2 of each stack, whose weights and gradients are sent."""
    plain, found = of_flux("stage=2,data=4"), of_flux("stage=2,data=4", pipeline_schedule="circular")
    model = twin("flux-dev", build_mesh(MeshSpec.parse("stage=2,data=4")), {})
    shapes = model.abstract_params()[0]
    stacked = [leaf for name in (DOUBLE_BLOCKS, SINGLE_BLOCKS) for leaf in jax.tree.leaves(shapes[name])]
    assert "all-to-all" not in {kind for kind, _ in plain}
    assert found["all-to-all", "stage"] == (2 * len(stacked), 2 * sum(leaf.size * 4 // 2 for leaf in stacked))
    # 4 microbatches, two rounds of 4 ticks and one more: 9 ticks, of which each moves a microbatch on
    assert found["collective-permute", "stage"][0] == 3 * 2 * 9


def test_every_tick_is_a_use_but_data_is_summed_after_the_last() -> None:
    """Two layers of 100 bytes, used 10 times at 5 ticks; gathered before the first and for each use backward."""
    layout = Layout.of(build_mesh(MeshSpec.parse("stage=2,data=2,fsdp=2")))
    one = Parameter(bytes=100, layers=2, again=True, gathered=("fsdp",), of_tokens=True, uses=10, once=("data",))
    assert totals(fully_sharded([one], ("data", "fsdp"), layout)) == {
        ("all-gather", "fsdp"): (2 + 10, 1200),
        ("reduce-scatter", "fsdp"): (10, 1000),
        ("all-reduce", "data"): (1, 100),
    }
    assert totals(sequence_parallel([one], ("context",), layout)) == {("all-reduce", "context"): (10, 500)}
    assert totals(sequence_parallel([replace(one, of_tokens=False)], ("context",), layout)) == {}


def test_border_rows_and_channels_of_one_convolution() -> None:
    """Both ways and back; the latents have no gradient."""
    assert totals(convolved([10, 10], ("context",), differentiated=True)) == {
        ("collective-permute", "context"): (4, 40)
    }
    assert totals(convolved([10], ("context",), differentiated=False)) == {("collective-permute", "context"): (1, 10)}
    assert totals(channel_parallel(("tensor",), 10, kept=False, differentiated=True)) == {
        ("all-gather", "tensor"): (2, 20),
        ("reduce-scatter", "tensor"): (1, 10),
    }
    assert totals(channel_parallel(("tensor",), 10, kept=True, differentiated=False)) == {
        ("all-gather", "tensor"): (1, 10)
    }


def test_a_unet_s_blocks_have_three_regions() -> None:
    """sd15's twin: 3 blocks of 16 channels on 256 tokens and one of 32 on 64, 8 samples a device; around each, a
    product back from tokens to channels, whose gradient is summed."""
    exchanges = budget(twin("sd15", build_mesh(MeshSpec.parse("data=2,tensor=4")), {}), **SIZES)
    blocks = totals(one for one in exchanges if one.what == "tokens")
    wide, deep = 8 * 256 * 16 * 4, 8 * 64 * 32 * 4
    assert blocks == {("all-reduce", "tensor"): (4 * 6, 6 * (3 * wide + deep))}
    ends = totals(one for one in exchanges if "embedded tokens" in one.what)
    assert ends == {("all-gather", "tensor"): (4, 3 * wide + deep), ("all-reduce", "tensor"): (4, 3 * wide + deep)}


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rows of feature maps lie over \(\) and sequences over \(context=4\)"):
        rules = {"logical_axis_rules": (("activation_height", None),)}
        budget(twin("sd15", build_mesh(MeshSpec.parse("context=4,data=2")), rules), **SIZES)
    with pytest.raises(UsageError, match="not for 'tensor': give a mesh of data and fsdp"):
        budget(twin("pictures", build_mesh(MeshSpec.parse("tensor=2,data=4")), {}), **SIZES)
    with pytest.raises(UsageError, match="12 samples do not divide by the 8 devices that share them"):
        budget(twin("flux-dev", build_mesh(MeshSpec.parse("data=8")), {}), **{**SIZES, "batch": 12})
    with pytest.raises(UsageError, match="4 heads do not divide by tensor=8, for which there is no formula"):
        budget(twin("flux-dev", build_mesh(MeshSpec.parse("tensor=8")), {"num_attention_heads": 4}), **SIZES)
    with pytest.raises(UsageError, match="2 layers do not divide by stage=4, so every stage has them all"):
        budget(twin("flux-dev", build_mesh(MeshSpec.parse("stage=4,data=2")), {"num_layers": 2}), **SIZES)
    with pytest.raises(UsageError, match="a circular pipeline whose weights are stored in parts"):
        of_flux("stage=2,fsdp=4", pipeline_schedule="circular")
    with pytest.raises(UsageError, match="most of a UNet lies outside of its pipelined stack"):
        budget(twin("sd15", build_mesh(MeshSpec.parse("stage=2,tensor=2,data=2")), {}), **SIZES)
