"""A checkpoint is whole, gives back the same run on any mesh, and is never overwritten by another run."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.load import load_run
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.run_folder import checkpoint_steps
from maxdiffusion.train.checkpoint import KEPT, Checkpoints, open_run, write_run
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
    return folder, _go(subject, state, 3)[1]


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    saved: tuple[Path, list[float]], subject: Subject
) -> None:
    folder, losses = saved
    state = Checkpoints(folder).restore(3, subject.shapes)
    assert _go(subject, state, 3)[1] == losses


def test_everything_comes_back_on_another_mesh(
    saved: tuple[Path, list[float]], subject: Subject, fsdp_tensor: Mesh
) -> None:
    folder, losses = saved
    other = make_subject(fsdp_tensor)
    state, same = (Checkpoints(folder).restore(3, one.shapes) for one in (other, subject))
    for leaf, plan, wanted in zip(*map(jax.tree.leaves, (state, other.shapes, same)), strict=True):
        assert leaf.sharding.is_equivalent_to(plan.sharding, leaf.ndim)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, wanted = jax.random.key_data(leaf), jax.random.key_data(wanted)
        np.testing.assert_array_equal(leaf, wanted)
    # The bound on loss curves of different meshes.
    np.testing.assert_allclose(_go(other, state, 3)[1], losses, rtol=1e-5)


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
    assert checkpoint_steps(tmp_path) == [2, 3, 4]


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
        (lambda recipe: dataclasses.replace(recipe, seed=5), "seed=0, and this recipe says 5"),
        (
            lambda recipe: dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=64)),
            "train.batch_size=32, and this recipe says 64",
        ),
    ],
)
def test_what_would_make_another_run_is_refused_at_resume(change: Callable, told: str, run: Path) -> None:
    with pytest.raises(UsageError, match=f"{told}: resume it with the old value"):
        open_run(change(tiny_recipe(run=str(run))), resume=True)


def test_a_resumed_run_may_be_longer_and_on_another_mesh(run: Path) -> None:
    recipe = load_run(run, ["train.steps=7", "mesh=data=2", "train.learning_rate=1"]).recipe
    assert open_run(recipe, resume=True) == (run, 3)
