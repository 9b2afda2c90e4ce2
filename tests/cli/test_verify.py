"""`verify` names the nearest model, rules and mesh axis; a table for people, an object for programs, 1 for a fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools import verify as tool
from maxdiffusion.tools.verify import Cell, Setting, VerifyResult


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "flux-dew", "--mesh", "fsdp=8"], "error: --model flux-dew is unknown: did you mean 'flux-dev'?"),
        (["--model", "sd15", "--mesh", "fsp=8"], "error: mesh axis 'fsp' is unknown: did you mean 'fsdp'?"),
        (["--model", "sd15", "--mesh", "fsdp=8", "--rules", "fdsp"], "error: --rules fdsp is unknown: did you mean"),
        (["--model", "sd15", "--mesh", "fsdp=16"], "error: mesh fsdp 16 = 16 devices, but there are 8"),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and len(err.splitlines()) == 1


@pytest.mark.parametrize(("error", "status"), [(1e-7, 0), (1e-3, 1)])
def test_the_exit_status_says_whether_all_hold(
    error: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"forward": error, "first_loss": 0.0, "gradients": 0.0, "worst_gradient": 0.0, "loss": 0.0}

    def result(model: str, *, mesh: MeshSpec, on_start: Any, on_cell: Any, **_: Any) -> VerifyResult:
        assert mesh == MeshSpec(axes=("data", "model"), data=4, model=2)
        cell: Cell = tool._cell(Setting(), errors, 1.0)
        on_start(2, "data=4,model=2")
        on_cell(cell)
        return VerifyResult(model=model, mesh="data=8", cells=(cell,))

    monkeypatch.setattr(tool, "verify", result)
    words = ["verify", "--model", "sd15", "--mesh", "data=4,model=2", "--mesh-axes", "data,model"]
    assert main([*words, "--json"]) == status
    out, err = capsys.readouterr()
    assert (
        "sd15 on data=4,model=2, 2 settings: each compiles it for the mesh" in err
        and "1 of 2: attention dot_product, context auto" in err
    )
    found = json.loads(out)
    assert (found["model"], found["ok"], found["cells"][0]["error"]) == ("sd15", status == 0, error)
    assert {"attention", "dtype", "remat", "scan", "limit", "ok", "quantity"} <= set(found["cells"][0])
    assert (", BEYOND its limit (1 s)" in err) == bool(status)
    assert ("check failed: 1 of 1 settings do not give the numbers of one device" in err) == bool(status)
    assert main(words) == status
    assert ("NO" in capsys.readouterr().out) == bool(status)
