"""A text is said once by each module, at its level."""

from __future__ import annotations

import logging

import pytest

from maxdiffusion.log import say_once


def test_a_text_is_said_once_by_each_module(caplog: pytest.LogCaptureFixture) -> None:
    one, other = logging.getLogger("maxdiffusion.one"), logging.getLogger("maxdiffusion.other")
    with caplog.at_level(logging.INFO, logger="maxdiffusion"):
        for _ in range(3):
            say_once(one, "test_log: this")
        say_once(one, "test_log: that", logging.INFO)
        say_once(other, "test_log: this")
    assert caplog.record_tuples == [
        ("maxdiffusion.one", logging.WARNING, "test_log: this"),
        ("maxdiffusion.one", logging.INFO, "test_log: that"),
        ("maxdiffusion.other", logging.WARNING, "test_log: this"),
    ]
