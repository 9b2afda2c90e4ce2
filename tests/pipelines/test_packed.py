"""A packed model paints what its run paints, but for the rounding of its weights to float16."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.load import load_run
from maxdiffusion.errors import UsageError
from maxdiffusion.models.text.transformer import TEXT_BLOCKS
from maxdiffusion.nn.stack import stack_params
from maxdiffusion.pipelines import packed, shipped
from maxdiffusion.pipelines.checkpoint_folder import split_place
from maxdiffusion.pipelines.generate import generate
from maxdiffusion.pipelines.packed import pack, read_packed
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS
from maxdiffusion.pipelines.run_folder import read_weights, weight_shapes
from maxdiffusion.pipelines.text_to_image import text_to_image_of
from maxdiffusion.pipelines.trained import open_trained, read_tokenizer
from maxdiffusion.train.run import TrainResult


@pytest.fixture(scope="module")
def model(trained: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, packed."""
    recipe = load_run(trained.run).recipe
    opened = open_trained(trained.run, recipe)
    return pack(
        tmp_path_factory.mktemp("packed") / "tiny-model",
        recipe=dataclasses.replace(recipe, run=None),
        tokenizer=opened.tokenizer,
        params=jax.tree.map(np.asarray, opened.params),
        step=6,
        figures={"seed": 0},
    )


def test_its_weights_are_the_runs_in_half_precision(model: Path, trained: TrainResult, fsdp_tensor: Mesh) -> None:
    recipe, words = load_run(model).recipe, read_tokenizer(model)
    subject = text_to_image_of(recipe, mesh=fsdp_tensor, vocab_size=words.vocab_size, max_length=words.max_length)
    shapes = weight_shapes(subject.model)
    (got, step), (wanted, _) = read_packed(model, shapes), read_weights(trained.run, shapes)
    assert step == 6
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float16).astype(np.float32), wanted)
    jax.tree.map(np.testing.assert_array_equal, got, rounded)
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(shapes), strict=True))


def test_layers_are_stacked_where_the_model_scans_them(fsdp_tensor: Mesh) -> None:
    folder = shipped.FOLDER / shipped.DEFAULT_MODEL
    recipe, words = load_run(folder).recipe, read_tokenizer(folder)
    trees = []
    for scan in (False, True):
        own = dataclasses.replace(recipe, scan_layers=scan)
        subject = text_to_image_of(own, mesh=fsdp_tensor, vocab_size=words.vocab_size, max_length=words.max_length)
        shapes = weight_shapes(subject.model)
        trees.append(read_packed(folder, shapes)[0])
        assert jax.tree.map(lambda leaf: leaf.sharding, trees[-1]) == jax.tree.map(lambda leaf: leaf.sharding, shapes)
    plain, stacked = trees
    assert len(jax.tree.leaves(stacked)) < len(jax.tree.leaves(plain))
    jax.tree.map(
        np.testing.assert_array_equal, stack_params(stack_params(plain, TEXT_BLOCKS), "transformer_blocks"), stacked
    )


def test_pictures_come_from_it_as_from_a_run(model: Path, tmp_path: Path) -> None:
    result = generate("a fox, noto style", model, out=tmp_path)
    assert result.step == 6 and result.files[0].is_file()


def test_a_name_of_the_package_stands_for_its_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name here is written with a dot; pictures of the packaged model do not go into the package."""
    monkeypatch.setattr(shipped, "FOLDER", model.parent)
    monkeypatch.chdir(tmp_path)
    assert split_place(model.name) == (model, None)
    assert split_place("other") == (Path("other"), None) and split_place(f"./{model.name}") == (Path(model.name), None)
    assert generate("a fox, noto style", model.name).files[0].parent == Path("generated")
    (tmp_path / model.name).mkdir()
    assert split_place(model.name) == (model, None)
    assert split_place(f"./{model.name}") == (Path(model.name), None)


def test_what_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    recipe, words = load_run(model).recipe, read_tokenizer(model)
    other = dataclasses.replace(recipe, model_config={**recipe.model_config, "text_width": 32})
    subject = text_to_image_of(other, mesh=None, vocab_size=words.vocab_size, max_length=words.max_length)
    with pytest.raises(UsageError, match=r"is of another model: .* is \(.*\) there and \(.*\) here"):
        read_packed(model, weight_shapes(subject.model))
    for name in (PACKED_WEIGHTS, packed.MADE):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with (tmp_path / PACKED_WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(UsageError, match="is damaged"):
        read_packed(tmp_path, {})
