"""The shipped classifier knows the built-in pictures, those that it never saw among them."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest

from maxdiffusion.data.pictures import concept_names, fixed_choice, pictures
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines import picture_features
from maxdiffusion.pipelines.picture_features import look
from maxdiffusion.train.likeness import GALLERY, nearest_is_own


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    """What was measured when it was made, on all pictures."""
    return json.loads(files("maxdiffusion").joinpath("shipped", "picture-classifier.json").read_text())


def test_held_out_pictures_are_known_as_often_as_its_file_says(figures: dict[str, dict[str, float]]) -> None:
    """100 of the 655 pictures: three standard deviations of a share among them are 0.15 at most."""
    gallery = fixed_choice(pictures(split="held_out"), GALLERY)
    assert len(gallery) == len(set(gallery.concepts)) == 100
    seen = look(gallery.images)
    np.testing.assert_allclose(np.linalg.norm(seen.features, axis=1), 1, rtol=1e-5)
    names = np.array(concept_names())[seen.concepts]
    assert (names == np.array(gallery.concepts)).mean() == pytest.approx(figures["held_out"]["concept"], abs=0.15)
    # Far from chance, which is 1 in 1,594.
    assert figures["held_out"]["concept"] > 0.4


def test_training_pictures_of_a_concept_find_its_held_out_picture() -> None:
    """What the features are for: the same concept in another style is near. Chance is 1 in 100."""
    gallery = fixed_choice(pictures(split="held_out"), GALLERY)
    known = pictures(gallery.concepts, split="train")
    rows = [known.concepts.index(concept) for concept in gallery.concepts]
    made = look(known.images[rows]).features[:, None]
    assert nearest_is_own(made, look(gallery.images).features).mean() > 0.7


def test_other_sizes_are_resized(figures: dict[str, dict[str, float]]) -> None:
    small, large = (look(pictures("fox", size=size).images).features for size in (32, 64))
    assert ((small * large).sum(axis=1) > 0.5).all()


def test_a_damaged_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    picture_features._params.cache_clear()
    monkeypatch.setattr(picture_features.json, "loads", lambda text: {"sha256": "0"})
    with pytest.raises(UsageError, match="install maxdiffusion again"):
        picture_features._params()
