"""Metrics as JSON lines, one object a line, written by one process and cut back where a run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax


class MetricsFile:
    """The file of a run's metrics; only the first process writes.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Opens the file for a run that starts after `resume_step`.

        Args:
            path: of the file; its folder exists.
            resume_step: lines of later steps are dropped: a run that died after its last checkpoint wrote some.
        """
        self.path = path
        self._writes = jax.process_index() == 0
        if self._writes:
            kept = [line for line in _lines(path) if resume_step and _step(line) <= resume_step]
            partial = path.with_suffix(".tmp")
            partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(partial, path)

    def write(self, step: int, values: Mapping[str, float | int | str | list[float]]) -> None:
        """Appends a line.

        Args:
            step: optimizer steps done.
            values: what was measured; a number that is not finite becomes null, in a list too.
        """
        if not self._writes:
            return
        plain = {
            key: [_finite(one) for one in value] if isinstance(value, list) else _finite(value)
            for key, value in values.items()
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")


def _finite(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[str]:
    """The whole lines of the file; a process that was killed may have left half a line."""
    if not path.is_file():
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
