"""A profiler's trace of some steps, from the end of one to the end of another, with nothing else in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from maxdiffusion.errors import UsageError
from maxdiffusion.paths import is_remote

PROFILE = "profile"
"""Folder of traces in that of a run."""


class Profiler:
    """Traces the steps of a range; only the first process does."""

    def __init__(self, span: tuple[int, int] | None, folder: Path) -> None:
        """Nothing runs before the first step of the range.

        Args:
            span: steps done when the trace begins, and when it ends; None traces nothing.
            folder: of the traces.
        """
        self.folder = folder
        self._span = span if jax.process_index() == 0 else None
        self._running = False

    def begins(self, done: int) -> bool:
        """Whether the trace begins when so many steps are done."""
        return self._span is not None and done == self._span[0]

    def ends(self, done: int) -> bool:
        """Whether the trace that runs ends when so many steps are done."""
        return self._running and self._span is not None and done == self._span[1]

    def start(self, state: Any) -> None:
        """Begins, once the devices have nothing left to do.

        Args:
            state: that the last step before the trace returned.
        """
        jax.block_until_ready(state)
        jax.profiler.start_trace(str(self.folder))
        self._running = True

    def stop(self, state: Any) -> None:
        """Ends, once the devices are done, and writes the files; does nothing where no trace runs."""
        if not self._running:
            return
        self._running = False
        jax.block_until_ready(state)
        jax.profiler.stop_trace()

    def close(self) -> None:
        """Ends a trace that still runs: its last step was never reached."""
        self.stop(None)

    def told(self) -> str:
        """The line about where the trace lies and how to look at it."""
        assert self._span is not None
        begin, end = self._span
        return (
            f"trace of steps {begin + 1} to {end}: {self.folder}; look at it with `pip install xprof && xprof "
            f"--logdir {self.folder}`, or give the .trace.json.gz in it to https://ui.perfetto.dev"
        )


def step_name(number: int) -> Any:
    """A context whose calls a trace shows as step `number`; costs nothing while none runs."""
    return jax.profiler.StepTraceAnnotation("train", step_num=number)


def check_span(span: tuple[int, int] | None, *, steps: int, folder: Path) -> None:
    """Refuses a range that no step of the run is in, before anything is compiled.

    Args:
        span: steps done when the trace begins, and when it ends.
        steps: of the run.
        folder: of the run.

    Raises:
        UsageError: the range ends after the run, or the run lives in an object store.
    """
    if span is None:
        return
    begin, end = span
    if end > steps:
        raise UsageError(
            f"profile.steps={begin}:{end} ends after the last step: end it at train.steps={steps} or before"
        )
    if is_remote(folder):
        raise UsageError(
            f"profile.steps={begin}:{end} writes a folder of files, and '{folder}' is an object store: give a local "
            "folder with run=FOLDER"
        )


def past(span: tuple[int, int] | None, *, done: int) -> str | None:
    """The line about a range that a resumed run has behind it; None where it has not."""
    if span is None or span[0] >= done:
        return None
    return f"profile.steps={span[0]}:{span[1]} begins before step {done}, where this run goes on: nothing is traced"
