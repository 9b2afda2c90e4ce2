"""`doctor` prints every finding, and its exit status says whether something is broken."""

from __future__ import annotations

import json

import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.tools import doctor
from maxdiffusion.tools.doctor import Finding, Scene

GOOD = Finding(check="python", state="ok", found="3.11")
BAD = Finding(check="flags", state="broken", found="a word that is no flag", cure="write --word")


@pytest.mark.parametrize(("findings", "status"), [((GOOD,), 0), ((GOOD, BAD), 1)])
def test_the_exit_status_tells(
    findings: tuple[Finding, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def examine(scene: Scene) -> tuple[Finding, ...]:
        return findings

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["broken"] == status
    assert [row["check"] for row in told["findings"]] == [finding.check for finding in findings]
    assert main(["doctor"]) == status
    assert all(finding.found in capsys.readouterr().out for finding in findings[-1:])
