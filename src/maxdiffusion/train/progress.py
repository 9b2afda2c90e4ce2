"""Progress on standard error: a bar where a terminal is, plain lines where none is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """Says what training does; silent in all processes but the first.

    Attributes:
        seconds_between_lines: where no terminal is, the shortest time between two lines about steps.
    """

    def __init__(self, *, seconds_between_lines: float = 10.0) -> None:
        self.seconds_between_lines = seconds_between_lines
        self._console = Console(stderr=True, quiet=jax.process_index() != 0)
        self._bar: Progress | None = None
        self._task = None
        self._total = 0
        self._last_line = -float("inf")

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Something that takes a while and is not a step, such as compiling; its seconds are told."""
        started = time.perf_counter()
        if self._console.is_terminal and self._bar is None:
            with self._console.status(text):
                yield
        else:
            yield
        self.say(f"{text}: {time.perf_counter() - started:.1f} s")

    @contextlib.contextmanager
    def steps(self, total: int, done: int) -> Iterator[None]:
        """The steps of training, `done` of `total` behind us.

        Args:
            total: optimizer steps of the run.
            done: where it starts.
        """
        self._total = total
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            self._bar = bar
            self._task = bar.add_task("training", total=total, completed=done, figures="")
            try:
                yield
            finally:
                self._bar = None

    def step(self, done: int, *, loss: float, images_per_second: float, seconds_left: float) -> None:
        """After some steps.

        Args:
            done: optimizer steps done.
            loss: mean since the last call.
            images_per_second: over all devices, compilation left out.
            seconds_left: to the last step.
        """
        figures = f"loss {loss:.4f}  {images_per_second:.1f} images/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, figures=figures)
            return
        now = time.monotonic()
        if done < self._total and now - self._last_line < self.seconds_between_lines:
            return
        self._last_line = now
        self.say(f"step {done}/{self._total}  {figures}  {_clock(seconds_left)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
