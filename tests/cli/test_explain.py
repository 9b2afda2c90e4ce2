"""`explain` names the nearest model, rules and mesh axis, and renders a report of a layout."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from maxdiffusion.cli.explain import (
    AS_ITS_STACK,
    LARGEST,
    _attentions,
    _cells,
    _convolutions,
    _kinds,
    _telling,
    _unmet_stacks,
    _with_stacks,
)
from maxdiffusion.cli.main import main
from maxdiffusion.common_types import BlockSizes
from maxdiffusion.parallel.layout import NO_RULE
from maxdiffusion.parallel.report import Row
from maxdiffusion.tools.explain import AttentionRow, ConvolutionRow


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "sdl", "--mesh", "fsdp=8"], "error: --model sdl is unknown: did you mean 'sdxl'?"),
        (["--model", "sdxl", "--mesh", "fsp=8"], "error: mesh axis 'fsp' is unknown: did you mean 'fsdp'?"),
        (["--model", "sdxl", "--mesh", "fsdp=-1"], "error: mesh axis fsdp=-1 takes the devices that are left, and"),
        (["--model", "sdxl", "--mesh", "data=-1,tensor=2"], "error: mesh axis data=-1 takes the devices that are"),
        (["--model", "sdxl", "--mesh", "8"], "error: mesh '8' is not AXIS=SIZE"),
        (["--model", "sdxl", "--mesh", "fsdp=8", "--rules", "fdsp"], "error: --rules fdsp is unknown: did you mean"),
        (
            ["--model", "sdxl", "--mesh", "fsdp=8", "--context-attention", "rng"],
            "error: --context-attention rng is unknown: did you mean 'ring'?",
        ),
        (
            ["--model", "sdxl", "--mesh", "fsdp=8", "--attention-kernel", "flsh"],
            "error: --attention-kernel flsh is unknown: did you mean 'flash'?",
        ),
        (
            ["--model", "sdxl", "--mesh", "data=4,model=2"],
            "error: mesh axis 'model' is unknown: valid: cfg, context, data, fsdp, stage, tensor (or name other axes: "
            "--mesh-axes data,model)",
        ),
        (
            ["--model", "sdxl", "--mesh", "data=4,tensor=2", "--mesh-axes", "data,model"],
            "error: mesh axis 'tensor' is unknown: valid: data, model\n",
        ),
        (["--model", "sdxl", "--mesh", "data=4", "--mesh-axes", "data,data"], "error: mesh axis 'data' is named twice"),
        (["--model", "sdxl", "--mesh", "fsdp=8", "--platform", "tpuu"], "error: --platform tpuu is unknown: did you"),
        (["--model", "sdxl", "--mesh", "fsdp=8", "--dtype", "int8"], "error: --dtype=int8 is no floating dtype"),
        (
            ["--model", "sdxl", "--mesh", "fsdp=8", "--quantization", "int5"],
            "error: --quantization int5 is unknown:",
        ),
        (["--model", "sdxl"], "error: Missing option '--mesh'."),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


def test_the_ledger_of_a_mode_folds_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Modulation multiplies plain numbers, from kernels that are stored in int8 all the same."""
    assert main(["explain", "--model", "flux-dev", "--mesh", "fsdp=8", "--quantization", "fp8_full"]) == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["transformer_blocks_*/attn/to_q", "19", "fp8_full", "fp8"] in lines
    assert ["transformer_blocks_*/norm1/linear", "19", "plain", "int8", "excluded by '(.*/)?norm[^/]*/linear'"] in lines
    assert main(["explain", "--model", "flux-dev", "--mesh", "stage=2", "--quantization", "int4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["quantization"]
    found = {row["module"]: row for row in rows}
    assert found["transformer_blocks/attn/to_q"] == {
        "module": "transformer_blocks/attn/to_q",
        "shape": [19, 3072, 24, 128],
        "mode": "int4",
        "stored": "int4",
        "reason": "",
    }
    assert found["x_embedder"]["stored"] == "int8" and "excluded by" in found["x_embedder"]["reason"]


def test_json_holds_totals_and_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "sd15", "--mesh", "fsdp=8", "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert (found["model"], found["mesh"], found["parameters"]) == ("sd15", "fsdp=8", 859_520_964)
    assert sum(row["bytes"] for row in found["rows"]) == found["bytes"] == 4 * found["parameters"]
    assert found["share_per_device"] <= 0.135  # ideal 0.125
    assert len(found["attention"]) == 32
    assert found["convolutions"] == []  # no rule cuts rows over fsdp
    assert (found["attention"][0]["kernel"], found["attention"][0]["context"]) == ("dot_product", "local")


def test_a_mesh_may_have_other_axes(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's mesh: the default rules give `model` what they give `tensor`; nothing is cut over the axis of data."""
    found = {}
    for mesh, axes in (("data=4,model=2", ["--mesh-axes", "data,model"]), ("data=4,tensor=2", [])):
        assert main(["explain", "--model", "pictures", "--mesh", mesh, *axes, "--json"]) == 0
        found[mesh] = json.loads(capsys.readouterr().out)
        assert found[mesh]["mesh"] == mesh
    ours, usual = found["data=4,model=2"], found["data=4,tensor=2"]
    assert ours["bytes_per_device"] == usual["bytes_per_device"] < ours["bytes"]
    assert {axis for row in ours["rows"] for dim in row["spec"] for axis in dim} == {"model"}


@pytest.mark.filterwarnings("default::maxdiffusion.errors.LayoutWarning")
def test_idle_stages_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "pictures", "--mesh", "stage=2,data=4", "--no-scan-layers", "--json"]) == 0
    err = capsys.readouterr().err
    assert err.count("the 2 stages of mesh axis 'stage' repeat the same work: scan_layers=False") == 1


@pytest.mark.filterwarnings("default::maxdiffusion.errors.MaxDiffusionWarning")
def test_a_warning_of_two_models_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The model on the mesh, and the one alone whose attentions are looked at."""
    assert main(["explain", "--model", "flux-schnell", "--mesh", "stage=2", "--dtype", "float16", "--json"]) == 0
    assert capsys.readouterr().err.count("warning: FLUX.1 in float16 can overflow") == 1


def _row(index: int, why: str = "") -> Row:
    return Row(
        parameter=f"p{index}",
        shape=(index, 8),
        dtype="float32",
        names=("embed", None),
        spec=(("data", "fsdp"), ()),
        bytes=8_000 * index,
        bytes_per_device=1_000 * index,
        why=why,
    )


def test_rows_with_a_reason_and_the_largest_are_shown_in_order() -> None:
    """The shapes differ, so that no rows are folded; a parameter that no rule shards is as the rules wish."""
    whys = {1: "heads", 2: NO_RULE}
    rows = [_row(index, why=whys.get(index, "")) for index in range(LARGEST + 5)]
    shown = [kind.path for kind in _telling(_kinds(rows))]
    assert shown == ["p1", *(f"p{index}" for index in range(5, LARGEST + 5))]


def test_equal_rows_of_blocks_are_one() -> None:
    """The numbers that differ become `*`; another shape is a row of its own."""
    paths = {"blocks_0/net_2/bias": 3, "blocks_1/net_2/bias": 3, "blocks_2/net_2/bias": 4, "out/bias": 3}
    kinds = _kinds([dataclasses.replace(_row(size), parameter=path) for path, size in paths.items()])
    assert [(kind.path, kind.count) for kind in kinds] == [
        ("blocks_*/net_2/bias", 2),
        ("blocks_2/net_2/bias", 1),
        ("out/bias", 1),
    ]
    assert _cells(kinds[0])[0] == "blocks_*/net_2/bias x2" and _cells(kinds[0])[4] == "0.006"


def test_a_stack_for_one_reason_is_one_row() -> None:
    """Its parameters are shown where they are among the largest, or have a reason of their own besides."""
    uneven = "layers of 3 does not divide by stage=2"
    whys = {"blocks/a": uneven, "blocks/b/c": f"{uneven}; heads", "free/a": "", "free/b": uneven, "blocks/d": uneven}
    rows = [
        dataclasses.replace(_row(3), parameter=path, shape=(3, 8), names=("layers", "embed"), why=why)
        for path, why in whys.items()
    ]
    rows.append(dataclasses.replace(_row(3), parameter="out/a"))
    stacks = _unmet_stacks(rows)
    assert {path: len(found) for path, found in stacks.items()} == {"blocks": 3}  # "free" has one that is as wished
    said = _with_stacks(rows, stacks)
    assert [(row.parameter, row.why) for row in said] == [
        ("blocks/*", uneven),
        ("blocks/a", AS_ITS_STACK),
        ("blocks/b/c", "heads"),
        ("free/a", ""),
        ("free/b", uneven),
        ("blocks/d", AS_ITS_STACK),
        ("out/a", ""),
    ]
    assert (said[0].shape, said[0].names, said[0].bytes_per_device) == ((3,), ("layers",), 9_000)
    largest = [dataclasses.replace(_row(index + 9), parameter=f"p{index}", shape=(index,)) for index in range(LARGEST)]
    shown = [kind.path for kind in _telling(_kinds([*said, *largest]))]
    assert shown[:3] == ["blocks/*", "blocks/b/c", "free/b"]


def test_stacks_of_other_sizes_are_one_row_with_the_bytes_of_all() -> None:
    sizes = {"blocks_0/stack/a": 3, "blocks_1/stack/a": 5}
    rows = [
        dataclasses.replace(_row(size), parameter=path, shape=(1, size), names=("layers", "embed"), why="layers")
        for path, size in sizes.items()
    ]
    rows += [dataclasses.replace(_row(1), parameter=f"blocks_{index}/norm") for index in range(2)]
    kinds = _kinds(_with_stacks(rows, _unmet_stacks(rows)))
    assert (_cells(kinds[0])[0], _cells(kinds[0])[4]) == ("blocks_*/stack/* x2", "0.008")


def test_the_table_says_a_stack_s_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    """FLUX.1 has 19 double blocks, which two stages cannot share, and 38 single ones."""
    assert main(["explain", "--model", "flux-dev", "--mesh", "stage=2,data=2,tensor=2"]) == 0
    out = capsys.readouterr().out
    assert out.count("layers of 19 does not divide by stage=2") == 1
    assert re.search(r"^transformer_blocks/\* +19 +layers +- +[0-9.]+ +layers of 19", out, re.MULTILINE)
    assert "39 of 67 parameters shown" in out  # 32 of that stack, and 7 of the largest
    calls = re.findall(r"^(\S*transformer_blocks\S*/attn) +([0-9]+) ", out, re.MULTILINE)
    assert calls == [("transformer_blocks/attn", "19"), ("single_transformer_blocks/attn", "38")]


def test_cells_say_spec_and_megabytes() -> None:
    (kind,) = _kinds([_row(3, "why")])
    assert _cells(kind) == ("p3", "3 x 8", "embed, -", "data+fsdp, -", "0.003", "why")


def test_equal_attentions_are_one_line() -> None:
    rows = [
        AttentionRow(
            module=f"block_{index}" if index < 3 else "stack",
            blocks=1 if index < 3 else 4,
            queries=(2, 64, 4, 8),
            keys=(2, 64, 4, 8),
            kernel="flash_cpu",
            block_sizes=BlockSizes(block_q=16, block_k=32),
            context="ring",
            ring=8,
            ulysses=1,
            reason="first" if index < 2 else "other",
        )
        for index in range(4)
    ]
    assert _attentions(rows) == [
        ("block_*", "2", "64", "64", "4", "flash_cpu", "16 x 32", "ring", "first"),
        ("block_2", "1", "64", "64", "4", "flash_cpu", "16 x 32", "ring", "other"),
        ("stack", "4", "64", "64", "4", "flash_cpu", "16 x 32", "ring", "other"),
    ]


def test_equal_convolutions_are_one_line() -> None:
    rows = [
        ConvolutionRow(
            module=f"conv_{index}",
            feature_map=(1, 16, 8, 4),
            features=4,
            size=3,
            stride=1 + index // 2,
            axes=("context",),
            rows=4,
            above=1,
            below=1,
            reason="cut",
        )
        for index in range(3)
    ]
    assert _convolutions(rows) == [
        ("conv_0", "2", "16", "8", "3", "1", "4", "cut"),
        ("conv_2", "1", "16", "8", "3", "2", "4", "cut"),
    ]
