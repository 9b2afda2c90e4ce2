"""`train --print-config` shows each value with its origin; mistakes stop it before anything heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxdiffusion.cli import hosts
from maxdiffusion.cli.main import main
from maxdiffusion.errors import INTERRUPTED


def _rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict]:
    assert main(["train", "pictures-demo", *words, "--print-config", "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    found = json.loads(out)
    assert found["recipe"] == "pictures-demo"
    return {row["key"]: row for row in found["rows"]}


def test_json_is_one_object_with_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(capsys, "train.steps=100", "mesh=data=2,tensor=4")
    assert rows["train.steps"] == {"key": "train.steps", "value": 100, "origin": "command line"}
    assert rows["mesh.tensor"] == {"key": "mesh.tensor", "value": 4, "origin": "command line"}
    assert rows["data.styles"] == {"key": "data.styles", "value": None, "origin": "default"}


def test_the_table_is_not_cut_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "a very long caption, " * 20
    assert main(["train", "pictures-demo", f'sample.prompts=["{prompt}"]', "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(prompt in line and "command line" in line for line in lines)
    assert any(line.split()[:2] == ["mesh.data", "4"] and "pictures-demo.yaml:" in line for line in lines)


def test_options_stand_anywhere_among_the_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-config", "pictures", "train.steps=7", "--json", "seed=3"]) == 0
    rows = {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert (rows["train.steps"], rows["seed"]) == (7, 3)


def test_virtual_devices_are_a_value_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert _rows(capsys, "--virtual-devices", "4")["virtual_devices"]["value"] == 4
    assert _rows(capsys)["virtual_devices"]["value"] == 8


def test_a_mistake_leaves_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "pictures", "train.lerning_rate=1", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: train.lerning_rate (command line) is unknown: did you mean 'train.learning_rate'?\n"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_training_that_was_stopped_and_saved_is_not_told_as_a_finished_one(
    interrupted: bool, several: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launchers start a run again by its status. Hosts part in peace: `leave` would end this process for a failure."""
    from maxdiffusion.train import run

    result = run.TrainResult(
        run=Path("runs/x"),
        step=3,
        loss=0.5,
        images_per_second=1.0,
        training_seconds=1.0,
        compile_seconds=1.0,
        total_seconds=2.0,
        samples=None,
        interrupted=interrupted,
    )
    parted: list[str] = []

    def trained(*_: Any, **__: Any) -> run.TrainResult:
        return result

    monkeypatch.setattr(run, "train", trained)
    monkeypatch.setattr(hosts, "joined", lambda: several and not parted)
    monkeypatch.setattr("jax.distributed.shutdown", lambda: parted.append("together"))
    words = ["train", "pictures-demo", "virtual_devices=null", "--json"]
    assert main(words) == (INTERRUPTED if interrupted else 0)
    assert json.loads(capsys.readouterr().out)["interrupted"] is interrupted
    assert parted == ["together"] * several
