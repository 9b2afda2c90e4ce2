"""Picture i of a batch is picture i alone, on any mesh; files say how they were made and replace none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

import maxdiffusion
from maxdiffusion.config.load import load_run
from maxdiffusion.data.png import read_text
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.pipelines.generate import generate, generate_from_run
from maxdiffusion.pipelines.run_folder import read_weights, weight_shapes
from maxdiffusion.pipelines.text_to_image import sampler, text_to_image_of
from maxdiffusion.train.run import TrainResult

PROMPT = "a red apple, flat style"


def _draw(run: Path, mesh: Mesh, indices: list[int], solver: str) -> np.ndarray:
    recipe = load_run(run, [f"sample.solver={solver}"]).recipe
    tokenizer = WordTokenizer.load(run / "tokenizer.json")
    subject = text_to_image_of(recipe, mesh=mesh, vocab_size=tokenizer.vocab_size, max_length=tokenizer.max_length)
    params, _ = read_weights(run, weight_shapes(subject.model))
    texts, empty = tokenizer.encode([PROMPT] * len(indices)), tokenizer.encode([""])
    return sampler(subject, recipe.sample)(params, texts, empty, seed=7, indices=np.array(indices))


@pytest.mark.parametrize("solver", ["dpmpp_2m", pytest.param("euler_ancestral", marks=pytest.mark.slow)])
def test_a_picture_does_not_depend_on_its_batch_or_mesh(
    solver: str, trained: TrainResult, one_device: Mesh, fsdp_tensor: Mesh
) -> None:
    alone = np.concatenate([_draw(trained.run, one_device, [index], solver) for index in (0, 4)])
    five = _draw(trained.run, fsdp_tensor, [0, 1, 2, 3, 4], solver)
    assert five.shape == (5, 8, 8, 3)
    # The bound of the specification for pictures in float32.
    np.testing.assert_allclose(five[[0, 4]], alone, atol=1e-4)
    assert np.abs(five[0] - five[4]).max() > 1e-2


def test_files_say_how_they_were_made(trained: TrainResult, tmp_path: Path) -> None:
    result = generate_from_run(trained.run, PROMPT, seed=7, num_images=2, out=tmp_path)
    assert [path.name for path in result.files] == [f"a-red-apple-flat-style-seed7-{index}.png" for index in (0, 1)]
    text = read_text(result.files[1])
    assert (text["prompt"], text["seed"], text["index"], text["step"]) == (PROMPT, "7", "1", "6")
    assert (text["solver"], text["steps"], text["model"], text["run"]) == ("dpmpp_2m", "2", "pictures", "tiny")
    assert text["maxdiffusion"] == maxdiffusion.__version__ and "jax" in text and "guidance_scale" in text
    assert result.unknown_words == ()


def test_no_file_is_replaced_and_several_prompts_go_together(trained: TrainResult) -> None:
    first = generate(["a fox, noto style", PROMPT], trained.run, seed=1)
    before = [path.read_bytes() for path in first.files]
    second = maxdiffusion.generate(PROMPT, trained.run, seed=1)
    assert first.files[1].parent == trained.run / "generated"
    assert second.files[0].name == "a-red-apple-flat-style-seed1-0-2.png"
    assert [path.read_bytes() for path in first.files] == before
    # A picture is the same whatever other prompts are made with it, up to rounding.
    pictures = [np.asarray(_pixels(path), int) for path in (first.files[1], second.files[0])]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


def test_an_older_checkpoint_makes_its_own_pictures(trained: TrainResult, tmp_path: Path) -> None:
    older = generate(PROMPT, f"{trained.run}@3", seed=7, out=tmp_path)
    newer = generate(PROMPT, trained.run, seed=7, out=tmp_path)
    assert (older.step, newer.step) == (3, 6)
    assert read_text(older.files[0])["step"] == "3"
    assert (_pixels(older.files[0]) != _pixels(newer.files[0])).any()


def test_unknown_words_are_named(trained: TrainResult, tmp_path: Path) -> None:
    with pytest.warns(
        MaxDiffusionWarning,
        match=r"'aple' was .* did you mean 'apple'\? its styles are fluent, flat, noto, twemoji, as in",
    ):
        result = generate("a red aple, flat style", trained.run, out=tmp_path)
    assert result.unknown_words == ("aple",)
    assert result.files[0].is_file()


def test_what_cannot_be_made_is_refused(trained: TrainResult, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        generate(PROMPT, tmp_path / "none")
    with pytest.raises(UsageError, match="nothing to make"):
        generate([], trained.run)
    with pytest.raises(UsageError, match="has 40 words and 15 fit"):
        generate("fox " * 40, trained.run)


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("fox.png", "'.*fox.png' is the name of a picture, .*: give a folder, such as .*fox$"),
        ("file", "'.*file' is a file: give a folder"),
        ("file/below", "the folder '.*file/below' cannot be made: Not a directory; give another one"),
    ],
)
def test_a_place_where_no_pictures_can_go_is_refused_before_weights_are_read(
    out: str, told: str, trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("maxdiffusion.pipelines.generate.open_trained", fail)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=told):
        generate(PROMPT, trained.run, out=tmp_path / out)


def _pixels(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture)
