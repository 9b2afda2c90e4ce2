"""The model that comes with the package is whole, says how it was made, and paints what it is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.cli.main import main
from maxdiffusion.config.load import load_recipe, load_run
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.checkpoint_folder import split_place
from maxdiffusion.pipelines.generate import generate
from maxdiffusion.pipelines.packed import MADE
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS
from maxdiffusion.pipelines.shipped import DEFAULT_MODEL, FOLDER

MODEL = FOLDER / DEFAULT_MODEL


def test_it_is_small_and_says_how_it_was_made() -> None:
    made = json.loads((MODEL / MADE).read_text(encoding="utf-8"))
    assert (MODEL / PACKED_WEIGHTS).stat().st_size <= 12_000_000
    assert made["evaluation"]["gallery"] == 100 and made["log"][-1]["step"] == made["step"] and "seed" in made


def test_its_recipe_is_the_one_of_its_name() -> None:
    """But for where and how often things are written."""
    packed, recipe = load_run(MODEL).recipe, load_recipe(DEFAULT_MODEL).recipe
    for name in ("model", "model_config", "seed", "dtype", "data", "diffusion", "sample"):
        assert getattr(packed, name) == getattr(recipe, name), name
    assert dataclasses.replace(packed.train, eval_every=0) == dataclasses.replace(recipe.train, eval_every=0)
    assert packed.train.steps == json.loads((MODEL / MADE).read_text(encoding="utf-8"))["step"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pictures-46", "no run 'pictures-46', nor a packaged model of that name: did you mean 'pictures-64'"),
        ("pictures-64@3", "'pictures-64' has one set of weights and no steps: leave '@3' out"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(place: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_place(place)


@pytest.mark.parametrize("words", [["evaluate"], ["report"], ["ckpt", "ls"], ["ckpt", "show"]])
def test_verbs_that_need_a_run_say_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, DEFAULT_MODEL]) == 2
    assert (
        f"error: '{DEFAULT_MODEL}' is a packaged model, which `maxdiffusion generate` alone takes"
        in capsys.readouterr().err
    )


@pytest.mark.whole
def test_it_paints_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A red apple is red, and a green one is not: the words matter."""
    monkeypatch.chdir(tmp_path)
    result = generate(["a red apple, flat style", "a green apple, flat style"])
    assert [path.parent for path in result.files] == [Path("generated")] * 2
    means = []
    for path in result.files:
        with Image.open(path) as picture:
            assert picture.size == (64, 64) and picture.text["run"] == DEFAULT_MODEL  # type: ignore[attr-defined]
            pixels = np.asarray(picture.convert("RGB"), np.float32)
        means.append(pixels[16:48, 16:48].mean((0, 1)))
    red, green = means
    assert red[0] > red[1] + 60 and green[1] > red[1] + 30, means
