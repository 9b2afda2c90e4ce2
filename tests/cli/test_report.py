"""`report` writes the page of a run anew, without jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maxdiffusion.cli.main import main


def test_report_says_where_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "report.html")}
    assert main(["report", str(tmp_path / "nowhere")]) == 2


def test_report_starts_no_jax(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    code = (
        "import sys; from maxdiffusion.cli.main import main; "
        "assert main(['report', sys.argv[1]]) == 0; assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
