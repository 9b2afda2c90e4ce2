"""`verify` names the nearest model, rules and mesh axis; a table for people, an object for programs, 1 for a fault."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools import verify as tool
from maxdiffusion.tools.verify import Cell, Setting, VerifyResult


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "flux-dew", "--mesh", "fsdp=8"], "error: --model flux-dew is unknown: did you mean 'flux-dev'?"),
        (["--model", "sd15", "--mesh", "fsp=8"], "error: mesh axis 'fsp' is unknown: did you mean 'fsdp'?"),
        (["--model", "sd15", "--mesh", "fsdp=8", "--rules", "fdsp"], "error: --rules fdsp is unknown: did you mean"),
        (
            ["--model", "wan", "--mesh", "fsdp=8"],
            "error: --model wan is unknown: valid: flux-dev, flux-schnell, pictures,",
        ),
        (["--model", "sd15", "--mesh", ""], "error: --mesh is empty: write for example --mesh data=4,tensor=2"),
        (
            ["--model", "sd15", "--mesh", "fsdp"],
            "error: mesh 'fsdp' is not AXIS=SIZE: write for example data=4,tensor=2",
        ),
        (
            ["--model", "sd15", "--mesh", "data=3"],
            "error: mesh data 3 = 3 devices, but there are 8: legal shapes nearest",
        ),
        (
            ["--model", "sd15", "--mesh", "dcn.data=3,fsdp=2"],
            "error: mesh data -1 x 3 slices x fsdp 2 = 6 devices, but there are 8: they make no 3 equal slices",
        ),
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
        cell: Cell = tool._cell(Setting(), errors, tool.LIMITS["float32"], 1.0)
        on_start(2, "data=4,model=2", "4 layers in mid_block alone")
        on_cell(cell)
        return VerifyResult(model=model, mesh="data=8", twin="4 layers in mid_block alone", cells=(cell,))

    monkeypatch.setattr(tool, "verify", result)
    words = ["verify", "--model", "sd15", "--mesh", "data=4,model=2", "--mesh-axes", "data,model"]
    assert main([*words, "--json"]) == status
    out, err = capsys.readouterr()
    assert "verify: for the stages of data=4,model=2 the twin of sd15 has 4 layers in mid_block alone\n" in err
    assert (
        "sd15 on data=4,model=2, 2 settings: each compiles it for the mesh" in err
        and "1 of 2: attention dot_product, context auto" in err
    )
    found = json.loads(out)
    assert found["twin"] == "4 layers in mid_block alone"
    assert (found["model"], found["ok"], found["cells"][0]["error"]) == ("sd15", status == 0, error)
    assert {"attention", "dtype", "remat", "scan", "limit", "ok", "quantity"} <= set(found["cells"][0])
    assert (", BEYOND its limit (1 s)" in err) == bool(status)
    assert ("check failed: 1 of 1 settings do not give the numbers of one device" in err) == bool(status)
    assert main(words) == status
    assert ("NO" in capsys.readouterr().out) == bool(status)


@pytest.mark.whole
def test_a_wrong_weight_on_the_mesh_gives_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run of one setting, with one of the weights that the mesh gets off by a thousandth of itself."""
    run = tool._run

    def wrong(model: DiffusionModel, plain: Any, inputs: Any, target: Any) -> Any:
        leaves, form = jax.tree.flatten(plain)
        if model.mesh is not None:
            largest = max(range(len(leaves)), key=lambda number: leaves[number].size)
            leaves[largest] = 1.001 * leaves[largest]
        return run(model, form.unflatten(leaves), inputs, target)

    monkeypatch.setattr(tool, "verify", functools.partial(tool.verify, only=[Setting()]))
    words = ["verify", "--model", "pictures", "--mesh", "data=8", "--json"]
    monkeypatch.setattr(tool, "_run", wrong)
    assert main(words) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["ok"], [cell["ok"] for cell in found["cells"]]) == (False, [False])
    assert found["cells"][0]["error"] > found["cells"][0]["limit"]
    assert err.splitlines()[-1] == "check failed: 1 of 1 settings do not give the numbers of one device"
    monkeypatch.setattr(tool, "_run", run)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_program_with_its_usual_options() -> None:
    """In a process of its own, as a user starts it."""
    words = ["verify", "--model", "flux-dev", "--mesh", "data=4,tensor=2", "--virtual-devices", "8", "--json"]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "maxdiffusion", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["mesh"], found["twin"], found["ok"]) == ("flux-dev", "data=4,tensor=2", "", True)
    keys = {"attention", "context", "pipeline", "dtype", "remat", "scan", "masked", "quantization"}
    keys |= {"error", "limit", "ok", "quantity", "errors", "seconds"}
    assert all(set(cell) == keys for cell in found["cells"])
    assert all(cell["error"] <= cell["limit"] and cell["ok"] for cell in found["cells"])
    for key, values in {
        "attention": {"dot_product", "flash"},
        "dtype": {"float32", "bfloat16"},
        "remat": {"none", "minimal", "full", "offload+attention,hidden"},
        "scan": {False, True},
    }.items():
        assert {cell[key] for cell in found["cells"]} == values
    assert f"{len(found['cells'])} of {len(found['cells'])}: " in done.stderr
