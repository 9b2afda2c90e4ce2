"""The built-in set: what is in it, how it is selected, and what is held out."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from maxdiffusion.data.pictures import (
    STYLES,
    Pictures,
    caption,
    concept_lists,
    concept_names,
    fixed_choice,
    is_held_out,
    pictures,
)
from maxdiffusion.data.source import Source
from maxdiffusion.errors import UsageError

FRUIT = ("red apple", "green apple", "banana", "lemon", "cherries")


@pytest.fixture(scope="module")
def whole() -> Pictures:
    return pictures(size=8)


def test_the_whole_set_is_every_concept_in_every_style(whole: Pictures):
    assert len(concept_names()) == 1594
    assert len(whole) == 1594 * 4
    assert whole.images.shape == (1594 * 4, 8, 8, 3) and whole.images.dtype == np.uint8
    assert whole.styles[:4] == STYLES == ("fluent", "flat", "noto", "twemoji")
    assert whole.concepts[::4] == concept_names()
    assert len(set(whole.captions)) == len(whole)
    assert isinstance(whole, Source)


def test_no_picture_is_blank_and_the_ground_is_white():
    fruit = pictures(FRUIT)
    assert fruit.size == 64
    assert (fruit.images.min(axis=(1, 2, 3)) < 128).all()
    corners = fruit.images[:, [0, 0, -1, -1], [0, -1, 0, -1]].reshape(len(fruit), 4, 3)
    assert (corners == 255).all(axis=2).sum(axis=1).min() >= 2, "drawings may touch a corner, not most of them"


def test_captions_are_phrases_with_a_style():
    assert caption("red apple", "flat") == "a red apple, flat style"
    assert caption("owl", "noto") == "an owl, noto style"
    assert caption("grapes", "fluent") == "grapes, fluent style"
    assert caption("unicorn", "twemoji") == "a unicorn, twemoji style"
    assert caption("man: blond hair", "flat") == "a man with blond hair, flat style"
    sample = pictures("fox", styles=["noto"])[0]
    assert (sample.caption, sample.key) == ("a fox, noto style", "fox/noto")
    assert sample.image.shape == (64, 64, 3)


def test_pictures_show_what_their_captions_say():
    """Mean colour inside the drawing: a check that names, styles and pictures did not slip against one another."""
    for concept, channel in (("red heart", 0), ("green heart", 1), ("blue heart", 2)):
        for sample in pictures(concept):
            inside = sample.image[24:40, 24:40].reshape(-1, 3).mean(axis=0)
            assert inside.argmax() == channel, (sample.key, inside)


def test_smaller_pictures_are_area_means_of_the_stored_ones():
    large, small = pictures(FRUIT), pictures(FRUIT, size=16)
    means = large.images.reshape(-1, 16, 4, 16, 4, 3).mean(axis=(2, 4))
    assert np.abs(small.images - means).max() <= 1, "half a unit for each of the two passes of an 8-bit resize"
    assert pictures("fox", size=24)[0].image.shape == (24, 24, 3)


def test_selection_does_not_depend_on_order_or_spelling_of_case():
    one = pictures(["lemon", "Banana", "  red   APPLE"], size=8)
    other = pictures("red apple, banana, lemon", size=8)
    assert one.captions == other.captions
    assert np.array_equal(one.images, other.images)
    position = {name: index for index, name in enumerate(concept_names())}
    assert list(one.concepts) == sorted(one.concepts, key=position.__getitem__)


def test_demo_list_is_160_concepts_of_the_set():
    demo = concept_lists()["demo-160"]
    assert len(demo) == len(set(demo)) == 160
    assert set(demo) <= set(concept_names())
    assert len(pictures("demo-160", size=8)) == 640
    assert len(pictures("demo-160", size=8, styles="flat, noto")) == 320
    assert not any("," in name for name in concept_names()), "commas separate concepts"


# --- the compositional test -------------------------------------------------------------------------------------------


def test_train_and_held_out_are_the_two_parts_of_all(whole: Pictures):
    pairs = list(zip(whole.concepts, whole.styles, strict=True))
    held_out = [pair for pair in pairs if is_held_out(*pair)]
    train, test = pictures(size=4, split="train"), pictures(size=4, split="held_out")
    assert list(zip(test.concepts, test.styles, strict=True)) == held_out
    assert list(zip(train.concepts, train.styles, strict=True)) == [pair for pair in pairs if pair not in set(held_out)]


def test_about_a_tenth_is_held_out_of_all_and_of_each_style(whole: Pictures):
    test = pictures(size=4, split="held_out")
    # A concept loses a style with probability 0.4, so counts are binomial; four standard deviations either side.
    expected, deviation = 0.4 * 1594, (0.4 * 0.6 * 1594) ** 0.5
    assert abs(len(test) - expected) < 4 * deviation
    by_style = Counter(test.styles)
    deviation = (0.1 * 0.9 * 1594) ** 0.5
    assert all(abs(by_style[style] - 159.4) < 4 * deviation for style in STYLES), by_style


def test_every_concept_keeps_at_least_three_styles_to_learn_from():
    assert min(Counter(pictures(size=4, split="train").concepts).values()) == 3


def test_held_out_pairs_of_a_selection_are_those_of_the_set():
    everything = pictures(size=4, split="held_out")
    demo = pictures("demo-160", size=4, split="held_out")
    chosen = set(concept_lists()["demo-160"])
    assert demo.captions == tuple(
        text for text, concept in zip(everything.captions, everything.concepts, strict=True) if concept in chosen
    )
    assert 0.08 <= len(demo) / 640 <= 0.12
    assert set(demo.styles) == set(STYLES)


def test_held_out_pairs_never_change():
    """Checkpoints are compared across releases, so the hash is part of the format."""
    test = pictures("demo-160", size=4, split="held_out")
    assert len(test) == 62
    assert [sample.key for sample in test][:4] == [
        "broken heart/fluent",
        "green heart/flat",
        "purple heart/twemoji",
        "brain/twemoji",
    ]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"concepts": ["red aple"]}, "unknown concept 'red aple': did you mean 'red apple'"),
        ({"concepts": "demo-161"}, "did you mean 'demo-160'"),
        ({"concepts": "book"}, "'closed book'"),
        ({"concepts": ["qqqqqqqq"]}, "concept_names"),
        ({"concepts": []}, "no concepts given"),
        ({"styles": ["flatt"]}, "unknown style 'flatt': did you mean 'flat'"),
        ({"split": "heldout"}, "did you mean 'held_out'"),
        ({"size": 128}, "size must be 4 to 64, not 128"),
        ({"size": 2}, "size must be 4 to 64"),
    ],
)
def test_mistakes_are_answered_with_the_nearest_name(arguments: dict, message: str):
    with pytest.raises(UsageError) as caught:
        pictures(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_selection_is_an_error():
    kept = next(name for name in FRUIT if not is_held_out(name, "flat"))
    with pytest.raises(UsageError, match="no picture left"):
        pictures(kept, styles=["flat"], split="held_out")
    with pytest.raises(UsageError, match="unknown style"):
        is_held_out("fox", "photo")


def test_a_fixed_choice_does_not_depend_on_what_else_there_is():
    """What is chosen from a part is chosen from the whole as well, if it comes first there; the order is the set's."""
    whole = pictures(size=4, split="held_out")
    chosen = fixed_choice(whole, 100)
    assert len(chosen) == 100 and list(chosen.captions) == [one for one in whole.captions if one in chosen.captions]
    part = pictures(chosen.concepts[:10], size=4, split="held_out")
    assert fixed_choice(part, 10).captions == chosen.captions[:10]
    assert fixed_choice(part, 20).captions == part.captions
    # Written down when the list was made: were it to change, figures of different versions could not be compared.
    assert hashlib.sha256("\n".join(chosen.captions).encode()).hexdigest()[:16] == "1d873cb3f55598c3"
