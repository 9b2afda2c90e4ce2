"""What one host pins the others read; a board without host 0 says so in one kind of error."""

from __future__ import annotations

import time

import pytest

from maxdiffusion.parallel.board import BoardGoneError, open_board
from tests.boards import Service, boards


def test_what_one_pins_the_others_read() -> None:
    first, second = boards(2)
    first.write("life/0", "a")
    second.write("life/1", "b")
    first.write("life/0", "c")
    assert second.read("life/0") == "c"
    assert second.read("life/7") is None
    assert second.read_all("life") == {"0": "c", "1": "b"}
    assert first.wait_for("life/1", 1) == "b"
    assert first.wait_for("left/1", 0.05) is None


def test_without_host_0_every_call_says_so() -> None:
    service = Service()
    _, board = boards(2, service)
    service.gone = True
    for call in (
        lambda: board.write("x/1", ""),
        lambda: board.read("x/1"),
        lambda: board.read_all("x"),
        lambda: board.wait_for("x/1", 1),
    ):
        with pytest.raises(BoardGoneError, match="UNAVAILABLE"):
            call()
    assert not board.reachable()


def test_host_0_leaves_last() -> None:
    first, second = boards(2)
    second.leave_last(60)  # returns at once
    began = time.monotonic()
    first.leave_last(0.3)
    assert time.monotonic() - began >= 0.3
    second.write("left/1", "done")
    first.leave_last(60)


def test_a_single_process_has_no_board() -> None:
    assert open_board() is None
