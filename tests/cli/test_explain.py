"""`explain` names the nearest model, rules and mesh axis, and renders a report of a layout."""

from __future__ import annotations

import json

import pytest

from maxdiffusion.cli.explain import LARGEST, _cells, _telling
from maxdiffusion.cli.main import main
from maxdiffusion.parallel.report import Report, Row


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "sdl", "--mesh", "fsdp=8"], "error: --model sdl is unknown: did you mean 'sdxl'?"),
        (["--model", "sdxl", "--mesh", "fsp=8"], "error: mesh axis 'fsp' is unknown: did you mean 'fsdp'?"),
        (["--model", "sdxl", "--mesh", "8"], "error: mesh '8' is not AXIS=SIZE"),
        (["--model", "sdxl", "--mesh", "fsdp=8", "--rules", "fdsp"], "error: --rules fdsp is unknown: did you mean"),
        (["--model", "sdxl"], "error: Missing option '--mesh'."),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


def test_json_holds_totals_and_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "sd15", "--mesh", "fsdp=8", "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert (found["model"], found["mesh"], found["parameters"]) == ("sd15", "fsdp=8", 859_520_964)
    assert sum(row["bytes"] for row in found["rows"]) == found["bytes"] == 4 * found["parameters"]
    assert found["share_per_device"] <= 0.135  # ideal 0.125


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
    rows = tuple(_row(index, why="heads" if index == 1 else "") for index in range(LARGEST + 5))
    shown = _telling(Report(rows=rows))
    assert [row.parameter for row in shown] == ["p1", *(f"p{index}" for index in range(5, LARGEST + 5))]


def test_cells_say_spec_and_megabytes() -> None:
    assert _cells(_row(3, "why")) == ("p3", "3 x 8", "embed, -", "data+fsdp, -", "0.003", "why")
