"""`evaluate` checks the run before it loads anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from maxdiffusion.cli.main import main


def test_a_folder_that_is_no_run_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "none"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "train one first" in err


@pytest.mark.parametrize(("learned", "status"), [(True, 0), (False, 1)])
def test_a_model_that_has_not_learnt_fails_the_check(
    learned: bool, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Result:
        learned: bool

    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: pictures\n")
    monkeypatch.setattr("maxdiffusion.train.evaluate.evaluate_run", lambda run, *, recipe: Result(learned))
    assert main(["evaluate", str(run), "--json"]) == status
    out, err = capsys.readouterr()
    assert out == f'{{"learned": {str(learned).lower()}}}\n'
    assert ("check failed" in err) is not learned
