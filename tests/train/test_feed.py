"""Batches come to the devices whole, in order, and laid out as asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiffusion.config.schema import DataSection
from maxdiffusion.data.batches import batches
from maxdiffusion.data.pictures import pictures
from maxdiffusion.errors import UsageError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.train.feed import captions_of, held_out_source, learn_words, make_feed, training_source

CAPTIONS = ["a red apple, flat style", "a fox"]


def test_examples_are_the_batch(data_model: Mesh) -> None:
    source = pictures(["red apple", "fox"], size=8)
    tokenizer = learn_words(captions_of(source))
    feed = make_feed(Layout.of(data_model), tokenizer, batch_size=8)
    batch = batches(source, batch_size=8, seed=0)[1]
    examples = feed(batch)
    np.testing.assert_array_equal(examples.images, batch.images)
    np.testing.assert_array_equal(examples.index, batch.position)
    np.testing.assert_array_equal(examples.ids, tokenizer.encode(batch.captions)[0])
    shapes = feed.shapes(8, (8, 8, 3))
    for leaf, plan in zip(vars(examples).values(), vars(shapes).values(), strict=True):
        assert (leaf.shape, leaf.dtype) == (plan.shape, plan.dtype)
        assert leaf.sharding.is_equivalent_to(plan.sharding, leaf.ndim)
    assert examples.images.sharding.spec == P("data")


def test_an_index_beyond_int32_wraps_and_stays_positive(data_model: Mesh) -> None:
    source = pictures(["red apple", "fox"], size=8)
    feed = make_feed(Layout.of(data_model), learn_words(captions_of(source)), batch_size=8)
    batch = batches(source, batch_size=8, seed=0)[0]
    late = feed(dataclasses.replace(batch, position=batch.position + 2**31 - 4))
    assert list(np.asarray(late.index)) == [2**31 - 4 + i for i in range(4)] + [0, 1, 2, 3]


def test_the_data_sharding_of_a_recipe_wins(data_model: Mesh) -> None:
    feed = make_feed(
        Layout.of(data_model),
        learn_words(CAPTIONS),
        batch_size=8,
        data_sharding=(("data", "model"), None, None, None),
    )
    assert feed.images.spec == P(("data", "model"), None, None, None)
    assert feed.rows.spec == P(("data", "model"))


@pytest.mark.parametrize(("sharding", "ways", "legal"), [(None, 4, "4 or 8"), ((("data", "model"),), 8, "8")])
def test_a_batch_that_does_not_divide_is_refused(
    sharding: tuple | None, ways: int, legal: str, data_model: Mesh
) -> None:
    with pytest.raises(UsageError, match=f"batch_size=6 does not divide by the {ways} devices .* take {legal}$"):
        make_feed(Layout.of(data_model), learn_words(CAPTIONS), batch_size=6, data_sharding=sharding)


def test_texts_are_as_long_as_the_longest_caption_needs() -> None:
    assert learn_words(CAPTIONS).max_length == 16
    words = " ".join(f"word{number}" for number in range(40))
    assert learn_words([words]).max_length == 48


def test_held_out_pairs_are_of_the_chosen_concepts() -> None:
    section = DataSection(concepts="demo-160", size=8)
    training, held_out = training_source(section), held_out_source(section)
    assert held_out is not None
    assert not {*captions_of(training)} & {*held_out.captions}
    assert len(training) + len(held_out) == 4 * 160
    assert held_out_source(DataSection(split="all")) is None
    assert held_out_source(DataSection(source="folder", path="x")) is None
