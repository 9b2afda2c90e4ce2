"""A step that is not finite changes nothing, however late that is seen; what was before it is saved and explained."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.data.batches import Batch, Batches
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.diverged import DivergedError, Rescue
from maxdiffusion.train.loop import Loop
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.progress import Reporter
from tests.train.conftest import BATCH, Subject, make_subject
from tests.train.runs import read_bits, read_lines

BAD = 2
"""Batch that is spoilt, counted from 0: that of the third step."""


@dataclasses.dataclass
class _Spoilt:
    """Batches of which one has pictures times a number."""

    batches: Batches
    factor: float

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size

    def __getitem__(self, step: int) -> Batch:
        batch = self.batches[step]
        return batch if step != BAD else dataclasses.replace(batch, images=batch.images * np.float32(self.factor))

    def iterate(self, start: int, **_: Any) -> Iterator[Batch]:
        return (self[step] for step in itertools.count(start))


def _run(subject: Subject, folder: Path, *, factor: float, **values: Any) -> str:
    """Trains until it fails; what is said."""
    section = TrainSection(
        **{"steps": 9, "batch_size": BATCH, "log_every": 4, "checkpoint_every": 0, "sample_every": 0, **values}
    )
    reports: list[int] = []
    loop = Loop(
        section=section,
        step=subject.step,
        batches=_Spoilt(subject.batches, factor),  # type: ignore[arg-type]
        feed=subject.feed,
        reporter=Reporter(),
        metrics=MetricsFile(folder / "metrics.jsonl"),
        checkpoints=Checkpoints(folder),
        on_report=lambda: reports.append(1),
        rescue=Rescue(folder=folder, objective=subject.objective, section=section),
    )
    with pytest.raises(DivergedError) as told:
        loop.run(subject.start())
    loop.checkpoints.close()
    assert reports
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


def test_a_spoilt_picture_is_named_and_the_state_before_it_is_kept(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "diverged" / "checkpoints" / "2").mkdir(parents=True)  # of an earlier failure
    told = _run(subject, tmp_path, factor=np.nan)
    keys = ", ".join(subject.batches[BAD].keys)
    assert told == (
        f"the loss became nan in step 3; first bad tensor: batch images ({keys}); the state before it is in "
        f"{tmp_path}/diverged/checkpoints/2; leave these pictures out, then start again"
    )
    state = subject.start()
    for step in range(BAD):
        state, _ = subject.step(state, subject.feed(subject.batches[step]))
    bits = read_bits(tmp_path / "diverged", BAD)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(bits[f"params/{name}"], leaf)
    # Not among those that a resumed run would start from.
    assert checkpoint_steps(tmp_path) == []
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and all(line["loss"] is not None for line in lines)
    written = json.loads((tmp_path / "diverged" / "bad-step.json").read_text())
    assert (written["step"], written["kind"], written["loss"]) == (3, "batch", "nan")
    assert written["rows"] == list(range(BATCH)) and written["samples"] == list(subject.batches[BAD].keys)


@pytest.mark.slow
def test_an_overflow_is_named_by_its_module_on_a_mesh(data_model: Mesh, tmp_path: Path) -> None:
    subject = make_subject(data_model)
    told = _run(subject, tmp_path, factor=3e38, checkpoint_every=2, learning_rate=0.25, grad_clip=None)
    assert re.search(r"^the (loss|gradients' norm) became (nan|inf) in step 3; first bad tensor: ", told), told
    assert re.search(r"first bad tensor: activation unet/\S+; the state before it is in \S+/2; ", told), told
    assert told.endswith(
        "lower train.learning_rate (0.25), lengthen train.warmup_steps (100) or set train.grad_clip, then go on from "
        "step 2 with resume=true"
    )


def test_a_step_after_a_bad_one_changes_nothing(subject: Subject) -> None:
    """Even where its own loss is finite: the state is that of before, and knows its step."""
    state = subject.start()
    wanted = jax.tree.map(np.array, (state.params, state.opt_state, state.ema))
    spoilt = _Spoilt(subject.batches, np.inf)
    state, bad = subject.step(state, subject.feed(spoilt[BAD]))
    assert not np.isfinite(bad.loss)
    state, after = subject.step(state, subject.feed(subject.batches[1]))
    assert np.isfinite(after.loss) and int(state.step) == ~0
    for got, leaf in zip(*map(jax.tree.leaves, ((state.params, state.opt_state, state.ema), wanted)), strict=True):
        np.testing.assert_array_equal(got, leaf)
