"""The training loop: steps, and between them metrics, samples, held-out losses and checkpoints."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.data.batches import Batch, Batches
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.diverged import DivergedError, Rescue
from maxdiffusion.train.feed import Feed
from maxdiffusion.train.meter import Meter
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.optim import learning_rate
from maxdiffusion.train.owed import Owed
from maxdiffusion.train.profile import Profiler, step_name
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, Step, StepResult, failed_before
from maxdiffusion.train.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop leaves.

    Attributes:
        state: after the last step.
        loss: mean over the last lines of metrics, about 50 steps.
        seconds: spent in steps, compilation left out.
        images: pictures that the steps of this loop have seen.
        interrupted: whether a signal stopped it before the last step.
    """

    state: TrainState
    loss: float
    seconds: float
    images: int
    interrupted: bool


@dataclass(kw_only=True)
class Loop:
    """Runs steps until the recipe's number is reached.

    Attributes:
        section: how many steps, and what happens every how many.
        step: the compiled training step.
        batches: of the training pictures.
        feed: puts them on the devices.
        reporter: says what happens.
        metrics: where lines of metrics go.
        checkpoints: where states go.
        on_sample: draws the grid of a state.
        on_evaluate: measures a state on held-out pictures; names and values for the metrics.
        on_report: writes the page about the run, at checkpoints and at the end.
        profiler: traces some steps.
        meter: says how well the devices are used.
        rescue: saves and explains what is left when a step is not finite.
        owed: what was due at the step that the loop starts from, and was not made.
        num_threads: threads that make batches ahead of the steps.
        watch: names who is late.
    """

    section: TrainSection
    step: Step
    batches: Batches
    feed: Feed
    reporter: Reporter
    metrics: MetricsFile
    checkpoints: Checkpoints
    on_sample: Callable[[TrainState], None] | None = None
    on_evaluate: Callable[[TrainState], dict[str, float | list[float]]] | None = None
    on_report: Callable[[], None] | None = None
    profiler: Profiler = field(default_factory=lambda: Profiler(None, Path()))
    meter: Meter | None = None
    rescue: Rescue | None = None
    owed: Owed = Owed()  # noqa: RUF009  (frozen)
    num_threads: int = 0
    watch: Watchdog = field(default_factory=lambda: Watchdog(seconds=None))
    _pending: list[StepResult] = field(default_factory=list, init=False)
    _recent: list[tuple[int, float]] = field(default_factory=list, init=False)
    _since: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _waited: float = field(default=0.0, init=False)
    _first: int = field(default=0, init=False)

    def run(self, state: TrainState) -> Outcome:
        """Steps from `state.step` to the last; the state is donated.

        A signal (Ctrl-C, SIGTERM) stops after the step that runs: the state is saved. A second one stops at once.

        Returns:
            What came of it; the last checkpoint is whole.

        Raises:
            DivergedError: a loss or a gradient is not finite.
            CheckpointError: a checkpoint could not be written, at the step after that became known.
        """
        section, done = self.section, int(state.step)
        self._first = done
        with _Stop() as stop, self.reporter.steps(section.steps, done), contextlib.closing(self.profiler):
            if self.owed.evaluation:
                self._evaluate(done, state)
            if self.owed.samples:
                self._sample(done, state)
            self._since = time.perf_counter()
            batches = self.batches.iterate(done, num_threads=self.num_threads)
            while done < section.steps and not stop.asked:
                if self.profiler.begins(done):
                    self._flush(done, state)
                    with self._clock_stopped("starting the profiler"):
                        self.profiler.start(state)
                examples = self._next(batches)
                with step_name(done):
                    state, result = self.step(state, examples)
                if self.meter is not None:
                    self.meter.step(examples.images.shape[1:])
                self._pending.append(result)
                done += 1
                self.watch.step(done)
                stop.agree(done)
                self.checkpoints.check()
                self._between(done, state, stop)
            if stop.asked and done < section.steps:
                self._flush(done, state)
                saved = self.checkpoints.save(state)
                self.checkpoints.wait()
                self.reporter.say(f"interrupted: saved step {saved}; go on with resume=true")
        self.watch.finished()
        self.checkpoints.wait()
        self.metrics.flush()
        if self.on_report is not None:
            self.on_report()
        return Outcome(
            state=state,
            loss=self._recent_loss(),
            seconds=self._seconds,
            images=(done - self._first) * self.batches.batch_size,
            interrupted=done < section.steps,
        )

    def _next(self, batches: Iterator[Batch]) -> Examples:
        """The next batch on the devices; the time that the loop waits for it is counted."""
        began = time.perf_counter()
        examples = self.feed(next(batches))
        self._waited += time.perf_counter() - began
        return examples

    def _between(self, done: int, state: TrainState, stop: _Stop) -> None:
        """What is due after step `done`."""
        section = self.section
        last = done == section.steps

        def due(every: int) -> bool:
            return bool(every) and (last or done % every == 0)

        if done == self._first + 1 or last or done % section.log_every == 0 or stop.asked:
            self._flush(done, state)
        if self.profiler.ends(done):
            self._flush(done, state)
            with self._clock_stopped("writing a trace"):
                self.profiler.stop(state)
            self.reporter.say(self.profiler.told())
        if stop.asked and not last:
            return
        if last or due(section.checkpoint_every):  # first, so that nothing of what follows can lose the steps
            self._flush(done, state)
            self.metrics.flush()
            with self._clock_stopped("saving a checkpoint"):
                self.checkpoints.save(state)
        if due(section.eval_every):
            self._evaluate(done, state)
        if due(section.sample_every):
            self._sample(done, state)
        if due(section.checkpoint_every) and not last and self.on_report is not None:
            with self._clock_stopped("writing the report"):
                self.on_report()

    def _evaluate(self, done: int, state: TrainState) -> None:
        if self.on_evaluate is not None:
            self._flush(done, state)
            with self._clock_stopped("measuring held-out pictures"):
                self.metrics.write(done, self.on_evaluate(state))

    def _sample(self, done: int, state: TrainState) -> None:
        if self.on_sample is not None:
            self._flush(done, state)
            with self._clock_stopped("drawing samples"):
                self.on_sample(state)

    def _flush(self, done: int, state: TrainState) -> None:
        """Fetches the losses since the last call, checks that they are finite, and writes a line.

        Args:
            done: steps handed out.
            state: that the last of them returned.

        Raises:
            DivergedError: one is not.
        """
        if not self._pending:
            return
        fetched: list[Any] = jax.device_get(
            [(result.loss, result.grad_norm, result.bin_sums, result.bin_counts) for result in self._pending]
        )
        losses, norms, sums, counts = (np.asarray(column, np.float64) for column in zip(*fetched, strict=True))
        number, self._pending = len(self._pending), []
        self.watch.settled(done)
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self._seconds += elapsed
        waited, self._waited = self._waited, 0.0
        broken = np.flatnonzero(~(np.isfinite(losses) & np.isfinite(norms)))
        fine = int(broken[0]) if broken.size else number
        loss = speed = math.nan
        if fine:
            loss, speed = float(losses[:fine].mean()), number * self.batches.batch_size / elapsed
            sums, counts = sums[:fine].sum(axis=0), counts[:fine].sum(axis=0)
            self.metrics.write(
                done - number + fine,
                {
                    "loss": loss,
                    "grad_norm": float(norms[:fine].mean()),
                    "loss_by_time": [
                        float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)
                    ],
                    "count_by_time": counts.tolist(),
                    "learning_rate": float(learning_rate(self.section)(done - number + fine - 1)),
                    "images_per_second": speed,
                    "seconds": self._seconds,
                    "input_wait": waited / elapsed,
                    **({} if self.meter is None else self.meter.line(elapsed)),
                },
            )
            self._recent = [*self._recent, (fine, loss)][-50:]
        if broken.size:
            self._diverged(done - number + fine, state, loss=float(losses[fine]), norm=float(norms[fine]))
        whole = (done - self._first) / self._seconds
        left = (self.section.steps - done) / whole
        self.reporter.step(done, loss=loss, images_per_second=speed, seconds_left=left)

    def _diverged(self, fine: int, state: TrainState, *, loss: float, norm: float) -> NoReturn:
        """Stops the training after `fine` steps that were finite.

        Raises:
            DivergedError: always.
        """
        before = failed_before(state)
        told = DivergedError(f"step {fine + 1} has the loss {loss} and a gradient of norm {norm}")
        if before is not None and self.rescue is not None:
            with self._clock_stopped("finding the first tensor that is not finite"):
                batch = self.batches[fine]
                told = self.rescue(before, self.feed(batch), batch, loss=loss, norm=norm)
        self.metrics.flush()
        if self.on_report is not None:
            self.on_report()
        raise told

    def _recent_loss(self) -> float:
        total = count = 0.0
        for number, loss in reversed(self._recent):
            total, count = total + number * loss, count + number
            if count >= 50:
                break
        return total / count if count else math.nan

    @contextlib.contextmanager
    def _clock_stopped(self, what: str) -> Iterator[None]:
        """What happens here is not counted as training time."""
        with self.watch.doing(what):
            yield
        self._since = time.perf_counter()


class _Stop:
    """Turns the first SIGINT or SIGTERM into a wish to stop; the second acts as usual.

    A host that stopped by itself would leave the others in a collective. With several hosts SIGTERM is left to jax's
    preemption service, which lets all of them stop after the same step; SIGINT becomes a SIGTERM.

    Attributes:
        asked: whether one has come, and with several hosts whether this is the step to stop after.
    """

    def __init__(self) -> None:
        self.asked = False
        self._several = jax.process_count() > 1
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def agree(self, done: int) -> None:
        """To be called after every step, on every host."""
        if self._several and multihost_utils.reached_preemption_sync_point(done):
            self.asked = True

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, *_: object) -> None:
        if self._several:
            signal.raise_signal(signal.SIGTERM)
        else:
            self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
