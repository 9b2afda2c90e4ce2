"""`quantize` checks what is asked before it loads anything."""

from __future__ import annotations

import pytest

from maxdiffusion.cli.main import main


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--mode", "int9", "--report"], "--mode int9 is unknown: did you mean 'int8'?"),
        ([], "quantize does one thing at a time: give --out DIR, or --report"),
        (["--report", "--out", "x"], "quantize does one thing at a time"),
        (["pictures-46", "--report"], "there is no run 'pictures-46', nor a packaged model of that name: did you mean"),
        (["pictures-64", "quantization_exclud=[x]", "--report"], "quantization_exclud (command line) is unknown"),
    ],
)
def test_a_wrong_request_is_one_line(words: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {cause}") and len(err.splitlines()) == 1
