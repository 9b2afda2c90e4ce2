"""Share of the parameter bytes that each device stores, for the full-size models; nothing is allocated."""

from __future__ import annotations

import pytest

from maxdiffusion.errors import LayoutWarning, MeshError, RuleError, UsageError
from maxdiffusion.log import say_once
from maxdiffusion.models.registry import lookup
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.explain import explain, explain_attention, explain_convolutions


@pytest.fixture(scope="module", params=["sdxl", "sd15", "flux-dev"])
def model(request):
    return request.param, lookup(request.param).build().abstract_params()


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        ("fsdp=8", {"sdxl": 0.130, "sd15": 0.135, "flux-dev": 0.128}),
        ("tensor=8", {"sdxl": 0.20, "sd15": 0.22, "flux-dev": 0.128}),
    ],
)
def test_share_per_device(model, mesh, most):
    name, tree = model
    report = Layout.of(abstract_mesh(MeshSpec.parse(mesh))).report(*tree)
    assert 1 / 8 <= report.share_per_device <= most[name]
    assert report.bytes == 4 * report.parameters


def test_heads_are_never_cut(model):
    _, tree = model
    report = Layout.of(abstract_mesh(MeshSpec.parse("tensor=8"))).report(*tree)
    for row in report.rows:
        for name, size, axes in zip(row.names, row.shape, row.spec, strict=True):
            assert name != "kv" or not axes
            assert name != "heads" or not axes or size % 8 == 0


def test_explain_is_the_report_of_the_registry_model():
    report = explain("sd15", mesh=MeshSpec.parse("fsdp=4,tensor=2"), logical_axis_rules="fsdp_tp")
    assert report.parameters == 859_520_964
    assert report.share_per_device < 0.135


def test_stages_stack_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """FLUX.1 has 38 single blocks, which two stages share evenly."""
    say_once.cache_clear()
    mesh = MeshSpec(stage=2, data=4)
    report = explain("flux-dev", mesh=mesh)
    assert sum("blocks are stacked, as the stages of mesh stage=2 need" in line for line in caplog.messages) == 1
    row = next(row for row in report.rows if row.parameter == "single_transformer_blocks/proj_mlp/kernel")
    assert (row.shape[0], row.names[0], row.spec[0]) == (38, "layers", ("stage",))
    assert row.bytes_per_device * 2 == row.bytes
    assert explain("flux-dev", mesh=mesh, scan_layers=True) == report
    with pytest.warns(LayoutWarning, match="the 2 stages of mesh axis 'stage' repeat the same work: scan_layers=False"):
        unrolled = explain("flux-dev", mesh=mesh, scan_layers=False)
    assert unrolled.share_per_device == 1 and unrolled.bytes == report.bytes


def test_wrong_names_and_strict():
    with pytest.raises(UsageError, match="did you mean 'sdxl'"):
        explain("sdlx", mesh=MeshSpec.parse("fsdp=8"))
    with pytest.raises(RuleError, match=r"conv_in.*the rule \('conv_in', None\) before the others leaves it whole"):
        explain("sd15", mesh=MeshSpec.parse("fsdp=8"), strict=True)
    with pytest.raises(MeshError, match="fsdp=-1 takes the devices that are left, and explain has none"):
        explain("sd15", mesh=MeshSpec(fsdp=-1))
    with pytest.raises(MeshError, match="second=-1 takes the devices that are left, and explain has none"):
        explain("sd15", mesh=MeshSpec(axes=("first", "second"), second=-1))


def test_every_attention_says_kernel_exchange_and_why():
    """Eight heads over eight devices; 16 transformer blocks, each with attention to itself and to the text."""
    rows = explain_attention("sd15", mesh=MeshSpec(context=8), attention_kernel="flash")
    assert len(rows) == 32
    first, text = rows[:2]
    assert first.module == "down_blocks_0/attentions_0/transformer_blocks_0/attn1"
    assert (first.queries, first.kernel, first.context, first.ring, first.ulysses) == (
        (1, 4096, 8, 40),
        "flash_cpu",
        "ulysses",
        1,
        8,
    )
    assert first.block_sizes is not None and "the heads of a device (8) divide by 8" in first.reason
    assert (text.keys, text.kernel, text.context) == ((1, 77, 8, 40), "dot_product", "local")
    assert "the 77 keys of another sequence are whole" in text.reason


def test_an_exchange_that_cannot_be_is_an_error():
    with pytest.raises(UsageError, match="ulysses_degree=16 does not divide the 8 devices"):
        explain_attention("pictures", mesh=MeshSpec(context=8), context_attention="hybrid", ulysses_degree=16)


def test_attention_takes_the_keywords_of_the_model() -> None:
    with pytest.raises(UsageError, match=r"'attention_kernl' is no keyword of .*did you mean 'attention_kernel'"):
        explain_attention("pictures", mesh=MeshSpec(data=8), attention_kernl="flash")
    with pytest.raises(UsageError, match="attention_kernel='flsh' is unknown: did you mean 'flash'"):
        explain_attention("pictures", mesh=MeshSpec(data=8), attention_kernel="flsh")
    own = [("activation_length", "tensor"), ("activation_heads", None)]
    rows = explain_attention("sd15", mesh=MeshSpec(tensor=2, data=1), logical_axis_rules=own)
    assert rows[0].context == "ulysses" and "the heads of a device (8) divide by 2" in rows[0].reason


def test_an_attention_of_a_stack_is_one_row() -> None:
    """FLUX.1: 19 double and 38 single blocks, 4096 tokens of image and 512 of text."""
    rows = explain_attention("flux-dev", mesh=MeshSpec(stage=2, data=4))
    assert [(row.module, row.blocks) for row in rows] == [
        ("transformer_blocks/attn", 19),
        ("single_transformer_blocks/attn", 38),
    ]
    assert {(row.queries, row.keys) for row in rows} == {((4, 4608, 24, 128), (4, 4608, 24, 128))}
    every, stacked = (explain_attention("pictures", mesh=MeshSpec(data=4), scan_layers=scan) for scan in (False, True))
    assert {row.blocks for row in every} == {1} and len(every) == sum(row.blocks for row in stacked) > len(stacked)


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "flash_tpu"), ("gpu", "flash_gpu"), ("cpu", "flash_cpu")])
def test_the_kernel_is_that_of_the_platform_that_is_asked_about(platform: str, kernel: str) -> None:
    flash = {"attention_kernel": "flash", "flash_min_seq_length": 0}
    rows = explain_attention("pictures", mesh=MeshSpec(data=8), platform=platform, dtype="bfloat16", **flash)
    assert {row.kernel for row in rows if row.block_sizes} == {kernel}


def test_every_convolution_says_which_rows_move():
    """Latents of 64 x 64: 64, 32, 16 and 8 rows divide by 8."""
    rows = explain_convolutions("sd15", mesh=MeshSpec(context=8))
    first, halving = rows[0], next(row for row in rows if row.stride == 2)
    assert (first.module, first.feature_map, first.axes) == ("conv_in", (1, 64, 64, 4), ("context",))
    assert (first.rows, first.above, first.below) == (8, 1, 1)
    assert (halving.rows, halving.above, halving.below) == (8, 1, 0)
    assert {row.axes for row in rows} == {("context",)}
    padded = explain_convolutions("sd21", mesh=MeshSpec(context=8))  # of 96, 48, 24 and 12 the last does not divide
    assert padded[0].feature_map[1] == 128 and all(row.axes == ("context",) for row in padded)
    assert explain_convolutions("sd15", mesh=MeshSpec(fsdp=8)) == ()
