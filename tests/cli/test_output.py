"""Results become one JSON object or a table, whatever numbers they hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.cli import output


@dataclass(frozen=True)
class _Inner:
    share: float


@dataclass(frozen=True)
class _Result:
    files: tuple[Path, ...]
    loss: float
    count: np.int64
    inner: _Inner
    done: bool = True


RESULT = _Result(files=(Path("a/0.png"), Path("a/1.png")), loss=float("nan"), count=np.int64(3), inner=_Inner(0.123456))


def test_json_is_one_valid_object(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_result(RESULT, as_json=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    expected = {"files": ["a/0.png", "a/1.png"], "loss": None, "count": 3, "inner": {"share": 0.123456}, "done": True}
    assert json.loads(out) == expected


def test_a_table_has_a_row_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_result(RESULT, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["files", "a/0.png"] in lines
    assert ["a/1.png"] in lines
    assert ["inner", "share", "0.12346"] in lines


def test_cells_are_texts_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_table(["a"], [["[bold]x[/bold]"]])
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_what_lower_code_writes_does_not_reach_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    with output.reserved():
        sys.stdout.write("noise")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "noise")


def test_what_json_cannot_say_is_an_error() -> None:
    with pytest.raises(TypeError, match="holds object"):
        output.show_json({"x": object()})
