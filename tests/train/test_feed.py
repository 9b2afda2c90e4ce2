"""Batches come to the devices whole, in order, and laid out as asked."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiffusion.config.schema import DataSection
from maxdiffusion.data.batches import batches
from maxdiffusion.data.pictures import pictures
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.train.feed import (
    captions_of,
    held_out_source,
    learn_words,
    make_feed,
    measured_source,
    reading_threads,
    training_source,
)
from tests.data.formats import FORMATS, some_files

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


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"source": "folder", "path": "x"}, "data.source=folder has no held-out pairs"),
        ({"split": "all"}, "data.split=all trains on the held-out pairs: write data.split=train"),
        ({"concepts": ("lemon",), "styles": ("flat",)}, "the concepts and styles chosen have no held-out pair"),
    ],
)
def test_measuring_where_nothing_is_held_out_is_warned_about(values: dict, told: str) -> None:
    section = DataSection(size=8, **values)
    with pytest.warns(MaxDiffusionWarning, match=f"train.eval_every=5 measures nothing: {told}"):
        assert measured_source(section, eval_every=5) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_source(section, eval_every=0) is None
        assert measured_source(DataSection(concepts="demo-160", size=8), eval_every=5) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_a_section_opens_every_format(name: str, tmp_path: Path) -> None:
    if name in ("arrow", "parquet"):
        pytest.importorskip("pyarrow")
    root = tmp_path / name
    root.mkdir()
    FORMATS[name][0](root, some_files())
    section = DataSection(
        source=name,  # type: ignore[arg-type]
        path=str(root),
        size=12,
        index_folder=str(tmp_path / "indices"),
        buckets="aspect",
        bucket_step=4,
    )
    source = training_source(section)
    assert captions_of(source) == [caption for _, caption, _ in some_files()]
    assert {source[row].image.shape[:2] for row in range(len(source))} == {(12, 12), (16, 8)}
    assert list((tmp_path / "indices").iterdir()) and not (root / ".maxdiffusion").exists()


def test_threads_read_files_and_nothing_else_by_default() -> None:
    assert reading_threads(DataSection()) == 0
    assert reading_threads(DataSection(source="webdataset", path="x")) == 4
    assert reading_threads(DataSection(source="webdataset", path="x", num_threads=1)) == 1
