"""A training begins with the weights of a run or of a packed model, and with nothing else of it but its words."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxdiffusion.config.load import load_recipe, load_run
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.pipelines import shipped
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps, read_manifest
from maxdiffusion.pipelines.packed import pack
from maxdiffusion.pipelines.text_to_image import TextToImage, text_to_image_of
from maxdiffusion.pipelines.trained import open_trained
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.run import TrainResult, train
from maxdiffusion.train.start import open_start
from maxdiffusion.train.state import initial_state, state_shapes
from tests.train.runs import read_bits, read_lines, run_recipe


@pytest.fixture(scope="module")
def packed(trained: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, packed."""
    recipe = load_run(trained.run).recipe
    opened = open_trained(trained.run, recipe)
    params = jax.tree.map(np.asarray, opened.params)
    folder = tmp_path_factory.mktemp("packed") / "tiny-model"
    recipe = dataclasses.replace(recipe, run=None, mesh={})
    return pack(folder, recipe=recipe, tokenizer=opened.tokenizer, params=params, step=6, figures={})


def _numbers(run: Path, step: int, part: str) -> dict[str, np.ndarray]:
    return {name.partition("/")[2]: array for name, array in read_bits(run, step).items() if name.startswith(part)}


def _check_equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys() and got
    for name, array in got.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def _subject(place: Path | str, *words: str) -> tuple[Any, TextToImage]:
    recipe = run_recipe(Path("unused"), f"train.start_from={place}", *words)
    start = open_start(str(place))
    known = start.tokenizer
    return start, text_to_image_of(
        recipe, mesh=build_mesh(recipe.mesh_spec), vocab_size=known.vocab_size, max_length=known.max_length
    )


WORDS = ("train.learning_rate=1e-30", "train.weight_decay=0.0", "train.sample_every=0", "train.eval_every=0")
"""Steps that move nothing: what a checkpoint holds is the start."""


@pytest.fixture(scope="module")
def started(trained: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of one step that began with an older step of the tiny run, and its words."""
    folder = tmp_path_factory.mktemp("started") / "run"
    words = [*WORDS, "data.concepts=[red apple, lemon, fox, violin]", f"train.start_from={trained.run}@3"]
    with pytest.warns(MaxDiffusionWarning, match=r"1 words of the captions are not among those of .*: 'violin'"):
        assert train(run_recipe(folder, *words, "train.steps=1")).step == 1
    return folder, words


def test_a_new_run_has_the_weights_a_fresh_optimizer_and_step_0(
    trained: TrainResult, started: tuple[Path, list[str]]
) -> None:
    folder, _ = started
    wanted, ours = _numbers(trained.run, 3, "ema"), read_bits(folder, 1)
    for part in ("params", "ema"):
        _check_equal(_numbers(folder, 1, part), wanted)
    counts = [int(array) for name, array in ours.items() if name.startswith("opt_state") and name.endswith("count")]
    assert counts and set(counts) == {1}, "of a fresh optimizer after one step"
    assert ours.keys() == read_bits(trained.run, 3).keys()
    assert (folder / "tokenizer.json").read_text() == (trained.run / "tokenizer.json").read_text()
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1]
    manifest: Any = read_manifest(folder / "checkpoints" / "1")
    assert (manifest["started_from"]["place"], manifest["started_from"]["step"]) == (f"{trained.run}@3", 3)
    assert load_run(folder).recipe.train.start_from == f"{trained.run}@3"


def test_a_resume_does_not_read_it_again_and_still_tells_it(
    started: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: str) -> None:
        raise AssertionError(f"{place} is read again")

    folder, words = tmp_path / "run", started[1]
    shutil.copytree(started[0], folder)
    monkeypatch.setattr("maxdiffusion.train.run.open_start", fail)
    assert train(run_recipe(folder, *words, "train.steps=2", "resume=true")).step == 2
    told: list[Any] = [read_manifest(folder / "checkpoints" / str(step)) for step in checkpoint_steps(folder)]
    assert (
        len(told) == 2 and told[0]["started_from"] == told[1]["started_from"] and told[0]["started_from"]["step"] == 3
    )
    with pytest.raises(UsageError, match=r"was trained with train.start_from=.*@3, and this recipe says null: write "):
        train(run_recipe(folder, *words, "train.start_from=null", "resume=true"))


def test_a_state_begins_with_a_packed_model_on_any_mesh(packed: Path, trained: TrainResult) -> None:
    start, subject = _subject(packed, "mesh=fsdp=4,tensor=2")
    section = run_recipe(Path("unused")).train
    rule = optimizer(section, subject.model)
    shapes = state_shapes(subject.model, rule, keeps_ema=True)
    state = initial_state(subject.model, rule, shapes, seed=0, params=start.weights(subject.model))
    half = {name: array.astype(np.float16) for name, array in _numbers(trained.run, 6, "ema").items()}
    for tree in (state.params, state.ema):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
        _check_equal(named, {name: array.astype(np.float32) for name, array in half.items()})
    assert int(state.step) == 0
    found = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.ema, state.opt_state))
    assert found == jax.tree.map(lambda leaf: leaf.sharding, (shapes.params, shapes.ema, shapes.opt_state))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model_config.text_width=32", "with model_config.text_width=16, and this recipe says 32: write model_config"),
        ("model_config.attention_levels=[true]", r"with model_config.attention_levels=\[false\], and this .* \[true\]"),
        ("train.start_from=tests/no-run", "train.start_from=tests/no-run: there is no run 'tests/no-run'"),
        ("train.start_from=pictures-46", "train.start_from=pictures-46: .* did you mean 'pictures-64'?"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled_or_written(
    word: str, told: str, trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("maxdiffusion.train.run.compile_sizes", fail)
    monkeypatch.setattr("maxdiffusion.train.run.initial_state", fail)
    with pytest.raises(UsageError, match=told):
        train(run_recipe(tmp_path / "run", f"train.start_from={trained.run}", word))
    assert not (tmp_path / "run").exists()


def test_another_prediction_is_warned_of(trained: TrainResult) -> None:
    start, subject = _subject(trained.run)
    recipe = run_recipe(Path("unused"), "diffusion.prediction=epsilon")
    with pytest.warns(MaxDiffusionWarning, match=r"trained with diffusion.prediction=sample, and go on with epsilon"):
        start.check(recipe, subject.model)


def test_the_packaged_model_fits_its_own_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("pictures-64", ["train.start_from=pictures-64", "mesh=data=1"]).recipe
    start = open_start("pictures-64")
    words = start.tokenizer
    subject = text_to_image_of(recipe, mesh=None, vocab_size=words.vocab_size, max_length=words.max_length)
    start.check(recipe, subject.model)
    made = json.loads((shipped.FOLDER / "pictures-64" / "made.json").read_text())
    assert start.told == {
        "place": "pictures-64",
        "folder": str(shipped.FOLDER / "pictures-64"),
        "step": made["step"],
        "mark": made["sha256"],
    }
