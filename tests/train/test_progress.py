"""Where no terminal is, progress is plain lines on standard error, and not too many."""

from __future__ import annotations

import pytest

from maxdiffusion.train.progress import Reporter


def test_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(seconds_between_lines=1000)
    with reporter.phase("compiling the step"):
        pass
    with reporter.steps(100, 0):
        for done in (1, 50, 100):
            reporter.step(done, loss=0.25, images_per_second=12.0, seconds_left=100.0 - done)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("compiling the step: ")
    assert lines[1:] == [
        "step 1/100  loss 0.2500  12.0 images/s  1:39 left",
        "step 100/100  loss 0.2500  12.0 images/s  0:00 left",
    ]


def test_text_in_brackets_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter().say("mesh [red]data=4[/red]")
    assert capsys.readouterr().err == "mesh [red]data=4[/red]\n"
