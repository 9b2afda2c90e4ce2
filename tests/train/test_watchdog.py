"""A late host is named with its step, a gone host with its name, and neither is said of a host that is well."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest

from maxdiffusion.errors import HostGoneError, UsageError
from maxdiffusion.parallel.board import Board
from maxdiffusion.train import watchdog
from maxdiffusion.train.watchdog import Watchdog
from tests.boards import Service, boards


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Intervals of tests; jax's abort is left alone."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.05)
    monkeypatch.setattr(watchdog, "GRACE", 0.05)
    monkeypatch.setattr(watchdog, "_say_on_abort", lambda board: None)
    yield


class _Other:
    """Another host: gives signs of life until it is stopped."""

    def __init__(self, board: Board, step: int = 0) -> None:
        self.board, self.step = board, step
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        count = 0
        while not self.stop.wait(0.02):
            count += 1
            sign = {"name": "other", "pid": 7, "step": self.step, "doing": "training", "count": count}
            self.board.write(f"life/{self.board.host}", json.dumps(sign))

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


def _until(ended: list[str], seconds: float = 10.0) -> str:
    deadline = time.monotonic() + seconds
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended, "nothing was said"
    return ended[0]


def test_the_late_host_is_named_once_and_stacks_follow(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = boards(2)
    other = _Other(theirs, step=4)
    with caplog.at_level(logging.WARNING), Watchdog(seconds=0.3, board=mine, end=pytest.fail) as watch:
        watch.step(5)
        time.sleep(1.2)
        watch.step(6)
    other.end()
    lines = [record.message for record in caplog.records if "is late" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("step 6 is late: nothing for ")
    assert "host 1 (other, pid 7) has not come beyond step 4, this is host 0" in lines[0]
    assert "test_the_late_host_is_named_once" in capfd.readouterr().err


def test_a_step_that_hangs_everywhere_is_no_hosts_fault(caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = boards(2)
    other = _Other(theirs, step=5)
    with Watchdog(seconds=0.2, board=mine, end=pytest.fail) as watch:
        watch.step(5)
        time.sleep(0.6)
    other.end()
    assert "every host has handed out step 5, so a device or a connection hangs" in caplog.text


def test_a_single_process_has_a_watchdog_too(caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog(seconds=0.2) as watch:
        watch.step(1)
        time.sleep(0.6)
    assert "step 2 is late: nothing for" in caplog.text and "this process's stacks follow" in caplog.text


def test_what_is_no_step_may_take_its_time(caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog(seconds=0.2) as watch:
        time.sleep(0.4)  # the first step has not begun
        watch.step(1)
        with watch.doing("saving a checkpoint"):
            time.sleep(0.4)
        assert "late" not in caplog.text
        for done in range(2, 5):  # handed out at once, finished one after the other
            watch.step(done)
        time.sleep(0.3)
        watch.settled(4)
        watch.finished()
        time.sleep(0.4)
    assert "late" not in caplog.text


def test_steps_that_were_handed_out_together_have_the_time_that_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second, fifty of which are handed out at once: the last may be late by a minute, not by fifty."""
    now = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    watch = Watchdog(seconds=60.0)
    watch.step(1)
    now = 1.0
    watch.settled(1)
    for done in range(2, 52):
        watch.step(done)
    now = 1.0 + 60.0 + 48.0
    assert watch._late() is None
    now = 1.0 + 60.0 + 50.0
    assert (watch._late() or "").startswith("step 52 is late: nothing for 110 s")


def test_a_host_without_a_sign_of_life_is_gone() -> None:
    mine, theirs = boards(2)
    ended: list[str] = []
    other = _Other(theirs, step=3)
    with Watchdog(seconds=None, host_seconds=0.4, board=mine, end=ended.append):
        time.sleep(0.8)
        assert not ended
        other.end()
        line = _until(ended)
    assert line.startswith("host 1 (other, pid 7, last seen after step 3) is gone: no sign of life for")


def test_a_host_whose_run_has_ended_well_is_not_gone() -> None:
    """Host 0 still closes its files, longer than a host may be silent."""
    mine, theirs = boards(2)
    ended: list[str] = []
    with Watchdog(seconds=None, host_seconds=0.3, board=mine, end=ended.append):
        with Watchdog(seconds=None, host_seconds=60.0, board=theirs, end=pytest.fail) as other:
            other.step(3)
            other.finished()
            time.sleep(0.2)
        time.sleep(0.9)
    assert ended == []


def test_a_host_that_dies_while_it_ends_is_gone() -> None:
    mine, theirs = boards(2)
    ended: list[str] = []
    sign = {"name": "other", "pid": 7, "step": 3, "doing": "ending", "count": 1}
    theirs.write("life/1", json.dumps(sign))
    with Watchdog(seconds=None, host_seconds=0.3, board=mine, end=ended.append):
        assert "host 1 (other, pid 7, ending, last seen after step 3) is gone" in _until(ended)


def test_a_host_that_has_left_says_why() -> None:
    mine, theirs = boards(2)
    ended: list[str] = []
    with Watchdog(seconds=None, board=mine, end=ended.append):
        theirs.write("left/1", "UsageError: the disk is full")
        line = _until(ended)
    assert line == "host 1 has left, and this host stops too; it said: UsageError: the disk is full"


def test_a_host_that_fails_leaves_a_line() -> None:
    mine, theirs = boards(2)
    with pytest.raises(UsageError), Watchdog(seconds=None, board=mine, end=pytest.fail):
        raise UsageError("the disk is full\nmore")
    assert theirs.read("left/0") == "UsageError: the disk is full"


def test_without_host_0_a_host_ends() -> None:
    service = Service()
    _, mine = boards(2, service)
    ended: list[str] = []
    with Watchdog(seconds=None, board=mine, end=ended.append):
        service.gone = True
        assert _until(ended).startswith("host 0, which coordinates the others, is gone")


def test_a_collective_that_fails_names_who_is_gone() -> None:
    mine, theirs = boards(2)
    theirs.write("life/1", json.dumps({"name": "other", "pid": 7, "step": 3, "doing": "training", "count": 1}))
    with (
        pytest.raises(HostGoneError, match=r"host 1 \(other, pid 7, last seen after step 3\) is gone"),
        Watchdog(seconds=None, board=mine, end=pytest.fail),
    ):
        try:
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
        except jax.errors.JaxRuntimeError as error:
            raise UsageError("the checkpoint could not be written") from error


def test_an_error_of_jax_with_all_hosts_well_stays_what_it_is() -> None:
    mine, theirs = boards(2)
    other = _Other(theirs)
    with pytest.raises(jax.errors.JaxRuntimeError), Watchdog(seconds=None, board=mine, end=pytest.fail):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    other.end()
