"""Ranges of steps that cannot be traced are refused; the loop's own test traces some."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxdiffusion.config.load import load_recipe
from maxdiffusion.errors import UsageError
from maxdiffusion.train.profile import Profiler, check_span, past


@pytest.mark.parametrize(("text", "wanted"), [("10:13", (10, 13)), ("0:1", (0, 1)), ("null", None)])
def test_a_range_is_two_numbers_of_steps(text: str, wanted: tuple[int, int] | None) -> None:
    assert load_recipe("pictures-demo", [f"profile.steps={text}"]).recipe.profile.span == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("13:10", "13:10 holds no step: write for example 13:16"),
        ("5:5", "5:5 holds no step: write for example 5:8"),
        ("ten", "'ten' is no range: write where it begins and ends, as in 10:13"),
        ("10", "write two numbers of steps, as in 10:13"),
    ],
)
def test_what_is_no_range_is_refused_with_the_recipe(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_recipe("pictures-demo", [f"profile.steps={text}"])


def test_a_range_beyond_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_span((10, 13), steps=13, folder=Path("run"))
    check_span(None, steps=1, folder=Path("run"))
    with pytest.raises(UsageError, match=r"profile.steps=10:13 ends after the last step: end it at train.steps=12"):
        check_span((10, 13), steps=12, folder=Path("run"))
    monkeypatch.setattr("maxdiffusion.train.profile.is_remote", lambda _: True)
    with pytest.raises(UsageError, match="is an object store: give a local folder"):
        check_span((10, 13), steps=20, folder=Path("run"))


def test_a_resumed_run_says_that_it_has_the_range_behind_it() -> None:
    assert past((10, 13), done=10) is None and past(None, done=5) is None
    assert past((10, 13), done=11) == (
        "profile.steps=10:13 begins before step 11, where this run goes on: nothing is traced"
    )
    profiler = Profiler((10, 13), Path())
    assert [done for done in range(11, 20) if profiler.begins(done) or profiler.ends(done)] == []


def test_only_the_first_host_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert not Profiler((10, 13), Path()).begins(10)
