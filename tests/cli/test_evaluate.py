"""`evaluate` checks the run before it loads anything."""

from __future__ import annotations

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
