"""A loop stops where it should, and says why; what happens between steps is not lost."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.loop import Loop
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.owed import Owed
from maxdiffusion.train.profile import Profiler
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, StepResult
from tests.train.conftest import BATCH, Subject, make_subject


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


def _loop(subject: Subject, folder: Path, section: TrainSection, **parts: Any) -> Loop:
    return Loop(
        section=section,
        batches=subject.batches,
        feed=subject.feed,
        reporter=Reporter(),
        metrics=MetricsFile(folder / "metrics.jsonl"),
        checkpoints=Checkpoints(folder),
        **{"step": subject.step, **parts},
    )


def _steps(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (folder / "checkpoints").iterdir())


def test_what_is_due_happens_at_its_step_and_at_the_last(subject: Subject, tmp_path: Path) -> None:
    section = TrainSection(
        steps=5, batch_size=BATCH, warmup_steps=2, log_every=2, sample_every=2, eval_every=3, checkpoint_every=4
    )
    sampled: list[int] = []
    measured: list[int] = []
    reported: list[list[int]] = []

    def measure(state: TrainState) -> dict[str, float]:
        measured.append(int(state.step))
        return {"held_out_loss": 1.0}

    outcome = _loop(
        subject,
        tmp_path,
        section,
        on_sample=lambda state: sampled.append(int(state.step)),
        on_evaluate=measure,
        on_report=lambda: reported.append(checkpoint_steps(tmp_path)),
    ).run(subject.start())
    # At a checkpoint, and at the end, when the last one is whole.
    assert len(reported) == 2 and reported[-1] == [4, 5]
    assert (sampled, measured, _steps(tmp_path)) == ([2, 4, 5], [3, 5], [4, 5])
    assert (outcome.images, outcome.interrupted, int(outcome.state.step)) == (5 * BATCH, False, 5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == [1, 2, 3, 4, 5]
    assert {line["step"] for line in lines if "held_out_loss" in line} == {3, 5}
    np.testing.assert_allclose(outcome.loss, np.mean(list(losses.values())), rtol=1e-6)


def test_what_is_owed_comes_before_the_first_step(subject: Subject, tmp_path: Path) -> None:
    section = TrainSection(steps=1, batch_size=BATCH, log_every=1, sample_every=0, eval_every=0, checkpoint_every=0)
    made: list[tuple[str, int]] = []

    def measure(state: TrainState) -> dict[str, float]:
        made.append(("evaluation", int(state.step)))
        return {"held_out_loss": 1.0}

    loop = _loop(
        subject,
        tmp_path,
        section,
        owed=Owed(evaluation=True, samples=True),
        on_evaluate=measure,
        on_sample=lambda state: made.append(("samples", int(state.step))),
    )
    loop.run(subject.start())
    assert made == [("evaluation", 0), ("samples", 0)]


@pytest.mark.parametrize("what", ["on_sample", "on_evaluate"])
def test_a_checkpoint_is_saved_before_what_else_is_due_in_its_step(what: str, subject: Subject, tmp_path: Path) -> None:
    section = TrainSection(
        steps=5, batch_size=BATCH, warmup_steps=2, log_every=2, sample_every=2, eval_every=2, checkpoint_every=2
    )

    def fails(state: TrainState) -> None:
        raise RuntimeError("no picture today")

    loop = _loop(subject, tmp_path, section, **{what: fails})
    with pytest.raises(RuntimeError, match="no picture today"):
        loop.run(subject.start())
    loop.checkpoints.close()
    assert _steps(tmp_path) == [2]


def test_a_trace_holds_the_steps_asked_for_and_no_others(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = TrainSection(steps=5, batch_size=BATCH, log_every=5, checkpoint_every=0, sample_every=0)
    _loop(subject, tmp_path, section, profiler=Profiler((2, 4), tmp_path / "profile")).run(subject.start())
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    # The steps of a trace are counted from 0.
    assert sorted({int(one["args"]["step_num"]) for one in events if "step_num" in one.get("args", {})}) == [2, 3]
    told = capsys.readouterr().err
    assert f"trace of steps 3 to 4: {tmp_path / 'profile'}; look at it with" in told and told.count("trace of") == 1


def test_a_trace_whose_end_is_never_reached_is_ended(subject: Subject, tmp_path: Path) -> None:
    section = TrainSection(steps=9, batch_size=BATCH, log_every=5, checkpoint_every=0, sample_every=0)
    ended: list[object] = []
    profiler = Profiler((1, 8), tmp_path / "profile")
    profiler.start = lambda state: setattr(profiler, "_running", True)  # type: ignore[method-assign]
    profiler.stop = lambda state: ended.append(state)  # type: ignore[method-assign]

    def step(state: TrainState, examples: Examples) -> tuple[TrainState, StepResult]:
        if int(state.step) == 3:
            raise KeyboardInterrupt
        return subject.step(state, examples)

    with pytest.raises(KeyboardInterrupt):
        _loop(subject, tmp_path, section, step=step, profiler=profiler).run(subject.start())
    assert ended == [None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_where(
    number: signal.Signals, subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = TrainSection(steps=50, batch_size=BATCH, log_every=10, checkpoint_every=0)

    def step(state: TrainState, examples: Examples) -> tuple[TrainState, StepResult]:
        if int(state.step) == 2:
            signal.raise_signal(number)
        return subject.step(state, examples)

    before = signal.getsignal(number)
    outcome = _loop(subject, tmp_path, section, step=step).run(subject.start())
    assert signal.getsignal(number) is before
    assert outcome.interrupted
    assert _steps(tmp_path) == [3] == [int(outcome.state.step)]
    assert "interrupted: saved step 3; go on with resume=true" in capsys.readouterr().err
