"""Metrics as JSON lines, one object a line, written by one process and cut back where a run resumes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from maxdiffusion.paths import is_remote, write_whole
from maxdiffusion.train.trackers import Tracker

SECONDS_BETWEEN_WRITES = 10.0
"""An object store's files cannot grow: the whole file is written anew, and not more often than this."""


class MetricsFile:
    """The file of a run's metrics; only the first process writes.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, *, resume_step: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        """Opens the file for a run that starts after `resume_step`.

        Args:
            path: of the file; its folder exists.
            resume_step: lines of later steps are dropped: a run that died after its last checkpoint wrote some.
            trackers: are told every line too.
        """
        self.path = path
        self._trackers = trackers
        self._told = -float("inf")
        self._writes = jax.process_index() == 0
        if self._writes:
            kept = [line for line in _lines(path) if resume_step and _step(line) <= resume_step]
            self._text = "".join(f"{line}\n" for line in kept)
            write_whole(path, self._text)

    def write(self, step: int, values: Mapping[str, float | int | str | list[float]]) -> None:
        """Appends a line.

        Args:
            step: optimizer steps done.
            values: what was measured; a number that is not finite becomes null, in a list too.
        """
        if not self._writes:
            return
        for tracker in self._trackers:
            tracker.write(step, values)
        plain = {
            key: [_finite(one) for one in value] if isinstance(value, list) else _finite(value)
            for key, value in values.items()
        }
        line = json.dumps({"step": step, **plain}) + "\n"
        if is_remote(self.path):
            self._text += line
            if time.monotonic() - self._told >= SECONDS_BETWEEN_WRITES:
                self.flush()
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def flush(self) -> None:
        """Brings an object store's file up to date; a local one always is."""
        if self._writes and is_remote(self.path):
            write_whole(self.path, self._text)
            self._told = time.monotonic()


def _finite(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[str]:
    """The whole lines of the file; a process that was killed may have left half a line."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append(line)
    return found


def _step(line: str) -> int:
    return int(json.loads(line).get("step", 0))
