"""A training is the same on every mesh, leaves a run that can be used, and goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import maxdiffusion
from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.png import read_text
from maxdiffusion.errors import UsageError
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.specs import MeshSpec
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.run import TrainResult, train
from maxdiffusion.train.state import TrainState
from tests.train.conftest import losses_of, make_subject
from tests.train.runs import read_bits, read_lines, run_recipe

STEPS = 20
MESHES = {
    "data 8": lambda: build_mesh(MeshSpec(data=8)),
    "fsdp 8": lambda: build_mesh(MeshSpec(fsdp=8, data=1)),
    "data 4, tensor 2": lambda: build_mesh(MeshSpec(data=4, tensor=2)),
    "by hand (data, model)": lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")),
    "by hand, Explicit": lambda: jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    ),
}


@pytest.fixture(scope="module")
def alone(one_device: Mesh) -> np.ndarray:
    return losses_of(make_subject(one_device), STEPS)


def test_the_losses_fall(alone: np.ndarray) -> None:
    assert alone[-5:].mean() < 0.9 * alone[:5].mean()


@pytest.mark.parametrize("name", MESHES)
def test_loss_curves_are_equal_on_every_mesh(name: str, alone: np.ndarray) -> None:
    # The bound of the specification, in float32 over 20 steps.
    np.testing.assert_allclose(losses_of(make_subject(MESHES[name]()), STEPS), alone, rtol=1e-5)


def test_patches_cannot_train() -> None:
    with pytest.raises(UsageError, match="pipeline_patches=4 approximates steps of sampling and cannot train"):
        train(Recipe(pipeline_patches=4))


def test_a_run_has_everything_in_its_folder(trained: TrainResult) -> None:
    assert (trained.step, trained.interrupted) == (6, False)
    assert checkpoint_steps(trained.run) == [3, 6]
    lines = read_lines(trained.run / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    for line in (line for line in lines if "loss" in line):
        assert sum(line["count_by_time"]) == 8 and len(line["loss_by_time"]) == 10
        by_time = zip(line["loss_by_time"], line["count_by_time"], strict=True)
        # The mean of the tenths is the mean of all, to the rounding of float32 sums.
        np.testing.assert_allclose(sum(mean * count for mean, count in by_time if count) / 8, line["loss"], rtol=1e-5)
        # The devices of a CPU have no known peak, and do not say what they use.
        assert line["tflops_per_second"] > 0 and line["mfu"] is None
        assert line["step_memory"] > 0 and line["host_memory"] > line["step_memory"]
    np.testing.assert_allclose(trained.loss, np.mean(losses), rtol=1e-6)
    assert "<h2>Samples</h2>" in (trained.run / "report.html").read_text(encoding="utf-8")
    measured = ["held_out_loss", "held_out_loss_by_time", "pictures_frechet", "retrieval", "step", "unconditional_loss"]
    assert [sorted(line) for line in lines if "held_out_loss" in line] == [measured]
    assert trained.samples == trained.run / "samples" / "step-000006.png"
    text = read_text(trained.samples)
    assert text["prompts"] == "a red apple, flat style\na fox, noto style"
    assert (text["step"], text["steps"]) == ("6", "2")
    assert load_run(trained.run).recipe == run_recipe(trained.run, "train.eval_pictures=1")
    assert trained.compile_seconds > 0 and trained.images_per_second > 0


def test_a_run_goes_on_exactly_where_it_was_killed(trained: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(trained.run, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    resumed = maxdiffusion.train(run_recipe(folder, "resume=true"))  # type: ignore[operator]
    assert resumed.step == 6

    def losses(run: Path) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line}

    assert losses(folder) == losses(trained.run)


def test_a_quantised_run_trains_float32_weights_and_goes_on_where_it_was_killed(
    trained: TrainResult, tmp_path: Path
) -> None:
    words = ("quantization=fp8_full", "dtype=bfloat16", "train.accumulation_steps=2", "train.ema_decay=0.9")
    words = (*words, "train.sample_every=0", "train.eval_every=0")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(run_recipe(whole, *words))
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "6")
    train(run_recipe(killed, "resume=true", *words))
    bits, again = read_bits(whole, 6), read_bits(killed, 6)
    assert bits.keys() == again.keys()
    for name in bits:
        np.testing.assert_array_equal(bits[name], again[name], err_msg=name)
    kernels = [name for name in bits if name.endswith("kernel") and name.startswith(("params", "ema"))]
    assert len(kernels) >= 20 and all(bits[name].dtype == np.float32 for name in kernels)
    before, plain = read_bits(whole, 3), read_bits(trained.run, 6)
    assert all((bits[name] != before[name]).any() and (bits[name] != plain[name]).any() for name in kernels)


def test_other_data_is_refused_before_anything_is_compiled_and_taken_when_asked(
    trained: TrainResult, tmp_path: Path
) -> None:
    """One sample fewer, and as many under other names; then the run goes on with what is there."""
    folder = tmp_path / "run"
    shutil.copytree(trained.run, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    manifest = folder / "checkpoints" / "3" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    number = content["data"]["num_samples"]
    for name, value, told in (
        ("captions", "0123", f"{number} samples as then, but other captions"),
        ("number", number + 1, f"{number + 1} samples then, {number} now"),
    ):
        changed = {**content["data"], "samples": {**content["data"]["samples"], name: value}}
        manifest.write_text(json.dumps({**content, "data": changed}))
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        cure = r"train\.resume_changes=\[data\]"
        with pytest.raises(UsageError, match=rf"was trained on other data \({told}\): bring the data back .*{cure}"):
            train(run_recipe(folder, "resume=true"))
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # The data is really the same here, so the losses show that nothing else went another way.
    assert train(run_recipe(folder, "resume=true", "train.resume_changes=[data]")).step == 6
    ours, alone = (
        {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line}
        for run in (folder, trained.run)
    )
    assert ours == alone


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Checkpoints, step: int, shapes: TrainState, **keywords: object) -> TrainState:
        raise UsageError("of another optimizer")

    folder = tmp_path / "run"
    shutil.copytree(trained.run, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    monkeypatch.setattr(Checkpoints, "restore", refuse)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="of another optimizer"):
        train(run_recipe(folder, "resume=true", "train.learning_rate=0.125"))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_are_closed_where_metrics_cannot_be(
    trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Checkpoints] = []

    def fail(self: MetricsFile) -> None:
        raise OSError("the tracker does not answer")

    folder = tmp_path / "run"
    shutil.copytree(trained.run, folder)
    monkeypatch.setattr(MetricsFile, "flush", fail)
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(self))
    with pytest.raises(OSError, match="the tracker does not answer"):
        train(run_recipe(folder, "resume=true"))
    assert len(closed) == 1


def test_a_run_that_is_there_is_not_touched(trained: TrainResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.run.rglob("*")}
    with pytest.raises(UsageError, match=r"is there already, trained to step 6: go on with resume=true"):
        train(run_recipe(trained.run))
    assert before == {path: path.stat().st_mtime_ns for path in trained.run.rglob("*")}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("ulysses_degree=3", "ulysses_degree=3"),
        ("train.batch_size=6", "train.batch_size=6 does not divide by the 4 devices"),
        ("model_config.image_size=16", "model_config.image_size follows from data.size"),
        ("model_config.dtype=bfloat16", "write dtype=... at the top level"),
        ("model_config.head_dim=0", "head_dim=0: write a whole number"),
        ("model_config.fould=2", "'fould' is no keyword of Pictures: did you mean 'fold'"),
        ("diffusion.prediction=epsilon", "prediction 'epsilon' does not determine the data"),
        (
            f'sample.prompts=["{"fox " * 16}"]',
            "sample.prompts: '(fox )+' has 16 words and 15 fit: shorten it",
        ),
        ("model=sd15", "model=sd15 cannot be trained or sampled from here yet: write model=pictures"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_written(word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        train(run_recipe(tmp_path / "run", word))
    assert not (tmp_path / "run").exists()
