"""A training over several sizes of pictures runs one program a size, and resumes by its step alone."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import DataSection, TrainSection
from maxdiffusion.data.batches import batches
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.pictures import pictures
from maxdiffusion.data.shards import ShardedPictures
from maxdiffusion.errors import UsageError
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.feed import training_source
from maxdiffusion.train.loop import Loop
from maxdiffusion.train.manifest import RunFacts, manifest
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.sizes import buckets_of, check_sizes, compile_sizes, image_shapes, told
from maxdiffusion.train.step import Step
from tests.train.conftest import BATCH, Subject, make_subject, tiny_recipe
from tests.train.runs import write_pictures


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardedPictures:
    """Squares and wide pictures, of the concepts of the tiny subject."""
    root = write_pictures(tmp_path_factory.mktemp("pictures"))
    section = DataSection(source="folder", path=str(root), size=8, buckets=("8x8", "4x12", "12x4"))
    found = training_source(section)
    assert isinstance(found, ShardedPictures)
    return found


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


@pytest.fixture(scope="module")
def step(subject: Subject, source: ShardedPictures) -> Step:
    return compile_sizes(subject.step, subject.shapes, subject.feed, batch_size=BATCH, images=image_shapes(source))


def test_what_is_told(source: ShardedPictures) -> None:
    assert image_shapes(source) == [(8, 8, 3), (4, 12, 3)]
    lines = told(source, 8)
    (line,) = [line for line in lines if "training programs" in line]
    buckets = buckets_of(source)
    assert buckets is not None
    assert line == f"buckets: 2 training programs, height x width: {buckets}"
    assert str(buckets.counts[0]) in line and sum(buckets.counts) == len(source)
    assert any("fewer pictures than a batch of 8" in line and "data.max_buckets" in line for line in lines)
    assert not any("fewer pictures" in line for line in told(source, 2))
    assert told(pictures(["fox"], size=8), 8) == []
    assert image_shapes(pictures(["fox"], size=8)) == [(8, 8, 3)]


def test_sizes_that_the_model_cannot_fold_are_refused_with_the_nearest(subject: Subject) -> None:
    model = subject.objective.text_to_image.model  # folds 2 x 2 pixels
    check_sizes(model, [(8, 8, 3), (4, 12, 3)], DataSection())
    listed = DataSection(source="folder", path="x", buckets=("5x13", "1x40"))
    with pytest.raises(
        UsageError, match=r"data\.buckets: .*folds 2 x 2 .*, and 5x13, 1x40 cannot be cut so: take 4x12, 2x40$"
    ):
        check_sizes(model, [(8, 8, 3), (5, 13, 3), (1, 40, 3)], listed)
    stepped = DataSection(source="folder", path="x", size=18, buckets="aspect", bucket_step=9)
    with pytest.raises(UsageError, match=r"data\.bucket_step=9: .*folds 2 x 2 .*: take 6 or 2$"):
        check_sizes(model, [(9, 27, 3)], stepped)


def test_a_checkpoint_knows_how_far_each_size_is_drawn(subject: Subject, source: ShardedPictures) -> None:
    """Of each size on its own: a batch is of one, and what an epoch leaves is carried on."""
    stream = subject.feed.batches(source, seed=0, buckets=buckets_of(source))
    sizes = tuple(size[:2] for size in image_shapes(source))
    facts = RunFacts(
        recipe=tiny_recipe(),
        layout=subject.objective.text_to_image.layout,
        tokenizer=subject.tokenizer,
        batches=stream,
        sizes=sizes,
        samples=Fingerprint.of(source),
    )
    data = manifest(5, {"params": subject.shapes.params}, facts)["data"]
    drawn = Counter(stream[step].images.shape[1:3] for step in range(5))
    assert [(tuple(one["size"]), one["samples"]) for one in data["buckets"]] == list(
        zip(sizes, source.buckets.counts, strict=True)
    )
    for one in data["buckets"]:
        assert one["epoch"] * one["samples"] + one["place"] == BATCH * drawn[tuple(one["size"])]
    assert data["next_sample"] == 5 * BATCH == stream[5].position[0]
    assert data["samples"] == Fingerprint.of(source).as_dict()


def _run(subject: Subject, source: ShardedPictures, step: Step, folder: Path, steps: int, resume: int = 0) -> list:
    """The metrics of a run, or of one that goes on after a step."""
    folder.mkdir(exist_ok=True)
    section = TrainSection(steps=steps, batch_size=BATCH, log_every=1, checkpoint_every=0, warmup_steps=2)
    checkpoints = Checkpoints(folder)
    buckets = buckets_of(source)
    assert buckets is not None
    loop = Loop(
        section=section,
        step=step,
        batches=batches(source, batch_size=BATCH, seed=0, buckets=buckets.of),
        feed=subject.feed,
        reporter=Reporter(),
        metrics=MetricsFile(folder / "metrics.jsonl", resume_step=resume),
        checkpoints=checkpoints,
        num_threads=2 if resume else 0,
    )
    loop.run(checkpoints.restore(resume, subject.shapes) if resume else subject.start())
    checkpoints.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_batch_runs_the_program_of_its_size_and_a_resumed_run_does_the_same(
    subject: Subject, source: ShardedPictures, step: Step, tmp_path: Path
) -> None:
    sizes = {
        batches(source, batch_size=BATCH, seed=0, buckets=source.buckets.of)[number].images.shape for number in range(6)
    }
    assert len(sizes) == 2, "both sizes must come, or this proves nothing"
    whole = _run(subject, source, step, tmp_path / "whole", 6)
    _run(subject, source, step, tmp_path / "parts", 3)
    parts = _run(subject, source, step, tmp_path / "parts", 6, resume=3)
    # The same programs on the same numbers, read with threads and without.
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    assert np.isfinite([line["loss"] for line in whole]).all()
    assert all(0 <= line["input_wait"] <= 1 for line in whole)


@pytest.mark.slow
@pytest.mark.whole
def test_a_mesh_of_eight_gives_every_size_the_losses_of_one_device(
    subject: Subject, source: ShardedPictures, step: Step, fsdp_tensor: Mesh
) -> None:
    def losses(one: Subject, program: Step) -> list[float]:
        stream, state, found = one.feed.batches(source, seed=0, buckets=buckets_of(source)), one.start(), []
        for number in range(4):
            state, result = program(state, one.feed(stream[number]))
            found.append(float(result.loss))
        assert len({stream[number].images.shape for number in range(4)}) == 2
        return found

    mesh = make_subject(fsdp_tensor)
    cut = compile_sizes(mesh.step, mesh.shapes, mesh.feed, batch_size=BATCH, images=image_shapes(source))
    # The bound of the specification for loss curves of different meshes.
    np.testing.assert_allclose(losses(mesh, cut), losses(subject, step), rtol=1e-5)


def test_a_slow_source_shows_in_the_wait_and_threads_take_it_away(
    subject: Subject, source: ShardedPictures, step: Step, tmp_path: Path
) -> None:
    class Slow:
        buckets = source.buckets

        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, index: int, /):
            time.sleep(0.02)
            return source[index]

    def slowed(state, examples):
        jax.block_until_ready(state)
        time.sleep(0.2)
        return step(state, examples)

    def wait(num_threads: int) -> float:
        folder = tmp_path / str(num_threads)
        folder.mkdir()
        loop = Loop(
            section=TrainSection(steps=5, batch_size=BATCH, log_every=5, checkpoint_every=0),
            step=slowed,
            batches=batches(Slow(), batch_size=BATCH, seed=0, buckets=source.buckets.of),
            feed=subject.feed,
            reporter=Reporter(),
            metrics=MetricsFile(folder / "metrics.jsonl"),
            checkpoints=Checkpoints(folder),
            num_threads=num_threads,
        )
        loop.run(subject.start())
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["input_wait"]

    # 0.16 s of reading beside 0.2 s of step: without threads almost half; with two, reading hides behind the step.
    assert wait(0) > 0.3
    assert wait(2) < 0.15
