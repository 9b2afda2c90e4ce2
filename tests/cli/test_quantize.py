"""`quantize` checks what is asked before it loads anything; its report keeps the floors, its models are small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.pipelines.packed import stored_mode
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--mode", "int9", "--report"], "--mode int9 is unknown: did you mean 'int8'?"),
        ([], "quantize does one thing at a time: give --out DIR, or --report"),
        (["pictures-64", "quantization=null", "--report"], "quantization=null: --mode says how to quantise"),
        (["--report", "--out", "x"], "quantize does one thing at a time"),
        (["pictures-46", "--report"], "there is no run 'pictures-46', nor a packaged model of that name: did you mean"),
        (["pictures-64", "quantization_exclud=[x]", "--report"], "quantization_exclud (command line) is unknown"),
    ],
)
def test_a_wrong_request_is_one_line(words: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {cause}") and len(err.splitlines()) == 1


@pytest.mark.parametrize(("mode", "floor"), [("int8", 30), ("fp8", 25)])
def test_pictures_of_the_shipped_model_keep_their_floor(
    mode: str, floor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against bfloat16, from the same noise; two prompts and few steps stand for the report of the docs."""
    prompts = [word for prompt in ("a fox, noto style", "a red apple, flat style") for word in ("--prompt", prompt)]
    changes = ["dtype=bfloat16", "sample.steps=4", "sample.num_per_prompt=1"]
    assert main(["quantize", *changes, "--mode", mode, "--report", "--no-table", "--json", *prompts]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["dtype"], found["pictures"], found["floor"]) == (mode, "bfloat16", 2, floor)
    assert floor <= found["psnr"] < 60 and 0.8 < found["ssim"] < 1 and found["modules"] == []
    assert found["bytes_ratio"] <= 0.53


def test_pictures_below_the_floor_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["sample.steps=2", "sample.num_per_prompt=1", "act_quantization_calibration_method=fixed,0.1"]
    assert main(["quantize", *changes, "--report", "--no-table", "--prompt", "a fox, noto style"]) == 1
    assert "check failed: PSNR" in capsys.readouterr().err


def test_what_is_written_is_small_and_says_how_it_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--mode", "int4", "--out", str(tmp_path / "small"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["mode"] == stored_mode(tmp_path / "small") == "int4"
    assert written["weights"]["ratio"] <= 0.30
    weights = (tmp_path / "small" / PACKED_WEIGHTS).stat().st_size
    assert written["weights"]["model_bytes"] <= weights < 1.01 * written["weights"]["model_bytes"]
