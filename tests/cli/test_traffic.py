"""`traffic` names the nearest model and mesh axis; a table for people, pages and programs, and 1 for other bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools import measure as tool
from maxdiffusion.tools.measure import Measured, Row


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "flux-dew"], "error: --model flux-dew is unknown: did you mean 'flux-dev'?"),
        (["--model", "sd15", "--mesh", "fsp=8"], "error: mesh axis 'fsp' is unknown: did you mean 'fsdp'?"),
        (["--model", "sd15", "--mesh", "fsdp=16"], "error: mesh fsdp 16 = 16 devices, but there are 8"),
        (
            ["--model", "sd15", "--mesh", "context=8", "--context-attention", "rng"],
            "error: --context-attention rng is unknown: did you mean 'ring'?",
        ),
        (["--model", "flux-dev", "--json", "--markdown"], "error: --json and --markdown are two forms of one result"),
        (
            ["--model", "flux-dev", "--rules", "fsdp"],
            "error: --mesh-axes, --rules, --context-attention and --pipeline-schedule are for one mesh",
        ),
        (["--model", "sd15", "--mesh-axes", "data,model"], "error: --mesh-axes, --rules, --context-attention and"),
        (["--model", "sd15", "--pipeline-schedule", "circular"], "error: --mesh-axes, --rules, --context-attention"),
        (
            ["--model", "sd15", "--mesh", "stage=2", "--pipeline-schedule", "circle"],
            "error: --pipeline-schedule circle is unknown: did you mean 'circular'?",
        ),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traffic", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and len(err.splitlines()) == 1


@pytest.mark.parametrize(("size", "status"), [(1_050, 0), (2_000, 1)])
def test_the_exit_status_says_whether_the_bytes_are_the_formula_s(
    size: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(
        what="gradients",
        kind="all-reduce",
        instead_of="reduce-scatter",
        axes="fsdp",
        count=3,
        bytes=size,
        formula=1_000,
        formula_count=3,
    )

    def result(model: str, **_: Any) -> Measured:
        return Measured(strategy="fsdp=8", mesh="fsdp=8", rows=(row,))

    monkeypatch.setattr(tool, "measure", result)
    words = ["traffic", "--model", "sd15", "--mesh", "fsdp=8"]
    assert main([*words, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["ok"]) == ("sd15", status == 0)
    assert (found["rows"][0]["bytes"], found["rows"][0]["ok"]) == (size, status == 0)
    assert main([*words, "--markdown"]) == status
    cells = f"gradients | all-reduce for reduce-scatter | fsdp | 3 | {size:,} | 3 | 1,000 | {size / 1_000:.3f} |"
    assert capsys.readouterr().out.splitlines()[2] == f"| fsdp=8 | fsdp=8 | {cells}"
    assert main(words) == status
    assert f"{size:,}" in capsys.readouterr().out


def test_a_mesh_without_a_formula_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(
        what="", kind="all-reduce", instead_of="", axes="tensor", count=3, bytes=9_000, formula=0, formula_count=0
    )

    def result(model: str, *, mesh: MeshSpec, **_: Any) -> Measured:
        assert mesh == MeshSpec(axes=("data", "model"), model=8)
        return Measured(strategy="tensor=8", mesh="tensor=8", rows=(row,), no_formula="only for FLUX.1")

    monkeypatch.setattr(tool, "measure", result)
    words = ["traffic", "--model", "sd15", "--mesh", "model=8", "--mesh-axes", "data,model"]
    assert main([*words, "--markdown"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2] == "| tensor=8 | tensor=8 | no formula | all-reduce | tensor | 3 | 9,000 | - | - | - |"
    assert err == "no formula for tensor=8: only for FLUX.1\n"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["formula_bytes"] is None


def test_one_device_moves_nothing_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "measure", lambda model, **_: Measured(strategy="data=1", mesh="data=1", rows=()))
    assert main(["traffic", "--model", "sd15", "--mesh", "data=1"]) == 0
    assert capsys.readouterr().err == "nothing of more than 4,096 bytes is moved on data=1\n"
