"""A checkpoint is whole, gives back the same run on any mesh, and is never overwritten by another run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint._src.serialization import serialization

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe, TrainSection
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps, flaw
from maxdiffusion.train import checkpoint
from maxdiffusion.train.checkpoint import KEPT, CheckpointError, Checkpoints, check_data, open_run, write_run
from maxdiffusion.train.feed import learn_words
from maxdiffusion.train.state import TrainState
from tests.train.conftest import Subject, make_subject, tiny_recipe


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


def _go(subject: Subject, state: TrainState, num_steps: int) -> tuple[TrainState, list[float]]:
    losses = []
    for _ in range(num_steps):
        state, result = subject.step(state, subject.feed(subject.batches[int(state.step)]))
        losses.append(float(result.loss))
    return state, losses


@pytest.fixture(scope="module")
def saved(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run saved after step 3, and the losses of the steps 4 to 6 that it went on with."""
    folder = tmp_path_factory.mktemp("run")
    state, _ = _go(subject, subject.start(), 3)
    checkpoints = Checkpoints(folder)
    assert checkpoints.save(state) == 3
    losses = _go(subject, state, 3)[1]
    checkpoints.close()
    return folder, losses


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    saved: tuple[Path, list[float]], subject: Subject
) -> None:
    folder, losses = saved
    state = Checkpoints(folder).restore(3, subject.shapes)
    assert _go(subject, state, 3)[1] == losses


# Neither 2 heads nor 16 channels divide by 3: they stay whole there, which is said.
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::maxdiffusion.errors.LayoutWarning")
def test_a_run_moves_to_other_devices_and_other_strategies(
    subject: Subject, tmp_path: Path, devices: np.ndarray
) -> None:
    """Data parallel on 8 devices, then one device, then FSDP and tensor parallel on 6."""
    eight, six = Mesh(devices, ("data",)), Mesh(devices[:6].reshape(2, 3), ("fsdp", "tensor"))
    subjects = [make_subject(eight), subject, make_subject(six)]
    unbroken = _go(subjects[1], subjects[1].start(), 9)[1]
    moved, state = [], subjects[0].start()
    for number, one in enumerate(subjects):
        checkpoints = Checkpoints(tmp_path)
        if number:
            state = checkpoints.restore(3 * number, one.shapes)
            for leaf, plan in zip(jax.tree.leaves(state), jax.tree.leaves(one.shapes), strict=True):
                assert leaf.sharding.is_equivalent_to(plan.sharding, leaf.ndim)
        state, losses = _go(one, state, 3)
        moved += losses
        checkpoints.save(state)
        checkpoints.close()
    # The bound on loss curves of different meshes.
    np.testing.assert_allclose(moved, unbroken, rtol=1e-5)
    np.testing.assert_array_equal(
        Checkpoints(tmp_path).restore(9, subjects[1].shapes).params["text"]["words"]["embedding"],
        state.params["text"]["words"]["embedding"],
    )


def test_a_checkpoint_that_was_being_written_does_not_count(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    (folder / "checkpoints" / "9.orbax-checkpoint-tmp-0").mkdir()
    assert checkpoint_steps(folder) == [3]


def test_only_the_newest_are_kept(subject: Subject, tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path), subject.start()
    for _ in range(KEPT + 1):
        state, _ = _go(subject, state, 1)
        checkpoints.save(state)
        checkpoints.save(state)
    checkpoints.close()
    assert checkpoint_steps(tmp_path) == [2, 3, 4]


def test_multiples_of_keep_every_are_kept_too(subject: Subject, tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path, keep=1, keep_every=2), subject.start()
    for _ in range(5):
        state, _ = _go(subject, state, 1)
        checkpoints.save(state)
    checkpoints.close()
    assert checkpoint_steps(tmp_path) == [2, 4, 5]


def test_what_is_written_is_the_step_that_was_saved(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing is held back until the state has been donated to five more steps."""
    go, held, write = threading.Event(), [], serialization.async_serialize_from_host

    async def late(*args: Any, **keywords: Any) -> None:
        held.append(1)
        assert await asyncio.to_thread(go.wait, 60)
        await write(*args, **keywords)

    monkeypatch.setattr(serialization, "async_serialize_from_host", late)
    state, _ = _go(subject, subject.start(), 2)
    wanted = jax.tree.map(lambda leaf: np.array(leaf, copy=True), (state.params, state.opt_state, state.ema))
    # Fresh buffers, of which nobody holds a view: as in training, donation may reuse them.
    state = _again(subject, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    state, _ = _go(subject, state, 5)
    jax.block_until_ready(state)
    assert held and checkpoint_steps(tmp_path) == []
    go.set()
    checkpoints.close()
    found = Checkpoints(tmp_path).restore(2, subject.shapes)
    jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt_state, found.ema), wanted)


def _again(subject: Subject, num_steps: int) -> TrainState:
    return _go(subject, subject.start(), num_steps)[0]


def test_an_error_in_the_background_is_one_line_at_the_next_step(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, state = Checkpoints(tmp_path), _again(subject, 1)
    checkpoints.save(state)
    checkpoints.wait()

    seal, room = Checkpoints.seal, []

    def full(self: Checkpoints, folder: Path, step: int) -> None:
        if not room:
            raise OSError(28, "No space left on device")
        seal(self, folder, step)

    monkeypatch.setattr(Checkpoints, "seal", full)
    checkpoints = Checkpoints(tmp_path)
    state, _ = _go(subject, state, 1)
    checkpoints.save(state)
    told = rf"the checkpoint of step 2 could not be written to {tmp_path}: .*No space left on device; the newest whole"
    deadline = time.monotonic() + 60
    with pytest.raises(CheckpointError, match=told + " one is that of step 1: make room"):
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.check()
    assert checkpoint_steps(tmp_path) == [1]
    assert not caplog.records
    room.append(True)
    checkpoints.save(state)
    checkpoints.close()
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_with_several_hosts_a_failure_is_raised_while_orbax_still_waits_for_the_others(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where host 0 failed, Orbax holds its thread until the others arrive, which wait for host 0."""

    def full(self: Checkpoints, folder: Path, step: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "seal", full)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(subject.start())
    monkeypatch.setattr(checkpoint, "_several_hosts", lambda: True)
    manager = checkpoints._manager
    with monkeypatch.context() as others:
        others.setattr(manager, "is_saving_in_progress", lambda: True)
        others.setattr(manager, "wait_until_finished", lambda: pytest.fail("it waited for the others"))
        deadline = time.monotonic() + 60
        with pytest.raises(CheckpointError, match=r"step 0 could not be written .*No space left on device"):
            while time.monotonic() < deadline:
                checkpoints.check()
                time.sleep(0.01)
        checkpoints.close()
    with contextlib.suppress(OSError):  # its thread's error
        manager.close()


def _cut(folder: Path) -> str:
    """Cuts the largest file of the weights in half; what is said of it."""
    largest = max(
        (path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[: size // 2])
    return f"{largest.relative_to(folder)} has {size // 2} bytes of {size}"


def _lose(folder: Path) -> str:
    (folder / "opt_state" / "manifest.ocdbt").unlink()
    return "opt_state/manifest.ocdbt is missing"


def _lose_part(folder: Path) -> str:
    shutil.rmtree(folder / "ema")
    return "ema/.* is missing"


@pytest.mark.parametrize("damage", [_cut, _lose, _lose_part])
def test_a_damaged_checkpoint_is_skipped_and_its_step_is_written_anew(
    damage: Callable[[Path], str], subject: Subject, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    shutil.copytree(folder / "checkpoints" / "3", folder / "checkpoints" / "5")
    write_run(folder, tiny_recipe(run=str(folder)), learn_words(["a fox"]))
    told = damage(folder / "checkpoints" / "5")
    recipe = tiny_recipe(run=str(folder))
    with pytest.warns(MaxDiffusionWarning, match=f"checkpoints/5 is not whole: {told}: step 3 is used instead"):
        assert open_run(recipe, resume=True) == (folder, 3)
    checkpoints = Checkpoints(folder)
    assert checkpoint_steps(folder) == [3]
    assert (folder / "checkpoints" / "5.broken").is_dir()
    state, _ = _go(subject, checkpoints.restore(3, subject.shapes), 2)
    checkpoints.save(state)
    checkpoints.close()
    assert checkpoint_steps(folder) == [3, 5]
    assert flaw(folder, 5) is None


def test_a_run_without_any_whole_checkpoint_is_not_begun_anew(run: Path) -> None:
    _lose(run / "checkpoints" / "3")
    with pytest.raises(UsageError, match=r"opt_state/manifest.ocdbt is missing: none is left to use"):
        open_run(tiny_recipe(run=str(run)), resume=True)


def test_another_dtype_is_read_only_when_asked(saved: tuple[Path, list[float]], subject: Subject) -> None:
    def halve(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16, sharding=leaf.sharding)

    shapes = subject.shapes.replace(ema=jax.tree.map(halve, subject.shapes.ema))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"in float32, and bfloat16 is wanted: .*train.resume_changes=\[cast\]"):
        Checkpoints(saved[0]).restore(3, shapes)
    found = Checkpoints(saved[0]).restore(3, shapes, allowed=("cast",))
    assert {leaf.dtype for leaf in jax.tree.leaves(found.ema)} == {jax.numpy.dtype("bfloat16")}


def _without_average(run: Path) -> None:
    """Makes the checkpoint one of a run that kept no averaged weights."""
    manifest = run / "checkpoints" / "3" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    content["files"] = {name: size for name, size in content["files"].items() if not name.startswith("ema/")}
    manifest.write_text(json.dumps(content))
    shutil.rmtree(manifest.parent / "ema")


def test_averaged_weights_come_and_go_only_when_asked(saved: tuple[Path, list[float]], run: Path) -> None:
    def recipe(**values: Any) -> Recipe:
        return tiny_recipe(run=str(run), train=TrainSection(**values))

    with pytest.raises(UsageError, match=r"train.ema_decay=0 would drop them: .*train.resume_changes=\[drop_ema\]"):
        open_run(recipe(ema_decay=0.0), resume=True)
    assert open_run(recipe(ema_decay=0.0, resume_changes=("drop_ema",)), resume=True) == (run, 3)
    _without_average(run)
    with pytest.raises(UsageError, match=r"no averaged weights, .*train.ema_decay=0, .*resume_changes=\[start_ema\]"):
        open_run(recipe(), resume=True)
    assert open_run(recipe(resume_changes=("start_ema",)), resume=True) == (run, 3)


def test_an_average_that_starts_at_resume_has_buffers_of_its_own(
    saved: tuple[Path, list[float]], subject: Subject, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    _without_average(folder)
    state = Checkpoints(folder).restore(3, subject.shapes, allowed=("start_ema",))
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)
    _go(subject, state, 1)  # would refuse to donate a buffer twice


def test_another_model_is_refused_by_the_parameters_name(saved: tuple[Path, list[float]], subject: Subject) -> None:
    def widen(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leaf.shape[:-1], leaf.shape[-1] + 1), leaf.dtype, sharding=leaf.sharding)

    shapes = subject.shapes
    other = jax.tree_util.tree_map_with_path(
        lambda path, leaf: widen(leaf) if "words" in jax.tree_util.keystr(path) else leaf, shapes.params
    )
    with pytest.raises(UsageError, match=r"text/words/embedding is float32\[15, 16\] there and float32\[15, 17\] here"):
        Checkpoints(saved[0]).restore(3, shapes.replace(params=other))  # type: ignore[attr-defined]


@pytest.fixture
def run(saved: tuple[Path, list[float]], tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    write_run(folder, tiny_recipe(run=str(folder)), learn_words(["a fox"]))
    return folder


def test_a_run_is_not_overwritten(run: Path) -> None:
    recipe = tiny_recipe(run=str(run))
    with pytest.raises(UsageError, match=r"trained to step 3: go on with resume=true, or give another .*run=FOLDER"):
        open_run(recipe, resume=False)
    assert open_run(recipe, resume=True) == (run, 3)
    assert open_run(tiny_recipe(run=str(run.parent / "new")), resume=True) == (run.parent / "new", 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda recipe: dataclasses.replace(recipe, seed=5), "seed=0, and this recipe says 5: write seed=0, or start"),
        (
            lambda recipe: dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=64)),
            "train.batch_size=32, and this recipe says 64: write train.batch_size=32, or start",
        ),
    ],
)
def test_what_would_make_another_run_is_refused_at_resume(change: Callable, told: str, run: Path) -> None:
    with pytest.raises(UsageError, match=told):
        open_run(change(tiny_recipe(run=str(run))), resume=True)


def test_a_recipe_is_compared_with_that_of_the_checkpoint(run: Path) -> None:
    """The run's own file may be of a later part, which was refused or died before its first checkpoint."""
    recipe = tiny_recipe(run=str(run))
    (run / "checkpoints" / "3" / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    _write_recipe(run, dataclasses.replace(recipe, seed=5))
    assert open_run(recipe, resume=True) == (run, 3)
    with pytest.raises(UsageError, match="seed=0, and this recipe says 5"):
        open_run(dataclasses.replace(recipe, seed=5), resume=True)


def test_an_older_state_without_a_limit_of_gradients_is_read(subject: Subject, tmp_path: Path) -> None:
    """Nothing stood in the limit's place, so that the states had other names."""
    checkpoints, start = Checkpoints(tmp_path), subject.start()
    limit, rule = start.opt_state
    checkpoints.save(dataclasses.replace(start, opt_state=(rule,)))
    checkpoints.wait()
    found = checkpoints.restore(0, subject.shapes)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure((limit, rule))
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, start.opt_state)
    with pytest.raises(UsageError, match="of another optimizer: "):
        checkpoints.restore(0, dataclasses.replace(subject.shapes, opt_state=(limit, subject.shapes.params)))
    checkpoints.close()


def test_adafactor_keeps_its_first_moments_or_has_none(run: Path) -> None:
    def recipe(beta1: float | None) -> Recipe:
        return tiny_recipe(run=str(run), train=TrainSection(optimizer="adafactor", beta1=beta1))

    for then, now, cure in (
        (None, 0.9, r"keep train\.beta1=null$"),
        (0.9, None, r"keep train\.beta1=0\.9 or set another value$"),
    ):
        _write_recipe(run, recipe(then))
        with pytest.raises(
            UsageError, match=f"trained by adafactor with train.beta1=.*: with a value it keeps .*{cure}"
        ):
            open_run(recipe(now), resume=True)
    assert open_run(recipe(0.5), resume=True) == (run, 3)


def _write_recipe(run: Path, recipe: Recipe) -> None:
    """Makes it that of the run."""
    write_run(run, recipe, learn_words(["a fox"]))


def test_a_resumed_run_may_be_longer_and_on_another_mesh(run: Path) -> None:
    recipe = load_run(run, ["train.steps=7", "mesh=data=2", "train.learning_rate=1"]).recipe
    assert open_run(recipe, resume=True) == (run, 3)


def test_how_data_is_read_may_change_and_what_is_read_may_not(run: Path) -> None:
    recipe = tiny_recipe(run=str(run), data={"num_threads": 2, "index_folder": "elsewhere"})
    assert open_run(recipe, resume=True) == (run, 3)
    other = {"split": "all"}
    with pytest.raises(UsageError, match=r"was trained with data\.split=train, and this recipe says all"):
        open_run(tiny_recipe(run=str(run), data=other), resume=True)
    wanted = tiny_recipe(run=str(run), data=other, train=TrainSection(resume_changes=("data",)))
    assert open_run(wanted, resume=True) == (run, 3)


def test_data_may_lie_elsewhere_where_its_samples_are_compared(run: Path) -> None:
    here, there = ({"source": "folder", "path": path} for path in ("here", "there"))
    write_run(run, tiny_recipe(run=str(run), data=here), learn_words(["a fox"]))
    with pytest.raises(UsageError, match=r"was trained with data\.path=here, and this recipe says there"):
        open_run(tiny_recipe(run=str(run), data=there), resume=True)
    samples = Fingerprint(number=2, names="a", captions="b", sizes="c")
    manifest = run / "checkpoints" / "3" / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"data": {"samples": samples.as_dict()}}))
    assert open_run(tiny_recipe(run=str(run), data=there), resume=True) == (run, 3)
    assert not check_data(run, 3, samples, allowed=())
    fewer = dataclasses.replace(samples, number=1)
    with pytest.raises(UsageError, match=r"2 samples then, 1 now"):
        check_data(run, 3, fewer, allowed=("cast",))
    assert check_data(run, 3, fewer, allowed=("data",))
