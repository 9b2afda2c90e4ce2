"""Pictures go to the size of the nearest ratio; the sizes are those asked for, and no more than allowed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.data.batches import batches
from maxdiffusion.data.buckets import LARGEST_RATIO, BucketRule, aspect_sizes
from maxdiffusion.data.folder import folder_shard
from maxdiffusion.data.shards import open_shards
from tests.data.formats import picture


@pytest.mark.parametrize(("size", "step"), [(64, 16), (512, 64), (1024, 64), (96, 8), (16, 16)])
def test_sizes_hold_no_more_than_the_budget_and_are_as_large_as_that_allows(size: int, step: int) -> None:
    sizes = aspect_sizes(size, step)
    assert (size, size) in sizes
    for height, width in sizes:
        short, long = sorted((height, width))
        assert height % step == width % step == 0 and (width, height) in sizes
        assert height * width <= size * size < short * (long + step)
        assert long / short <= LARGEST_RATIO


def test_the_nearest_ratio_on_a_logarithmic_scale() -> None:
    rule = BucketRule(sizes=((64, 64), (32, 128)))
    # Between 1 and 4 the border lies at 2, their geometric mean, not at 2.5.
    shapes = np.array([[100, 100], [100, 199], [100, 201], [1, 1000], [300, 100]])
    found = rule.sort(shapes)
    assert [found.sizes[bucket] for bucket in found.of] == [(64, 64), (64, 64), (32, 128), (32, 128), (64, 64)]
    assert found.counts == (3, 2)
    assert str(found) == "64 x 64 (3 pictures), 32 x 128 (2 pictures)"


def test_sizes_that_no_picture_has_are_not_in_use() -> None:
    found = BucketRule(sizes=aspect_sizes(512, 64)).sort(np.array([[600, 600], [512, 500]]))
    assert found.sizes == ((512, 512),) and found.of.tolist() == [0, 0]


def test_over_the_limit_the_rarest_is_given_up() -> None:
    shapes = np.array([[64, 64]] * 5 + [[48, 80]] * 3 + [[80, 48]] + [[32, 96]] * 2)
    rule = BucketRule(sizes=((64, 64), (48, 80), (80, 48), (32, 96)), limit=2)
    found = rule.sort(shapes)
    assert set(found.sizes) == {(64, 64), (48, 80)}
    assert [found.sizes[bucket] for bucket in found.of[[0, 5, 8, 9]]] == [(64, 64), (48, 80), (64, 64), (48, 80)]
    shuffled = np.random.default_rng(0).permutation(len(shapes))
    assert (rule.sort(shapes[shuffled]).of == found.of[shuffled]).all()


def test_rare_buckets_come_with_a_cure() -> None:
    found = BucketRule(sizes=((64, 64), (48, 80))).sort(np.array([[64, 64]] * 8 + [[48, 80]] * 3))
    assert found.rare(3) is None
    text = found.rare(4)
    assert text is not None and "48 x 80 (3)" in text and "data.max_buckets" in text and "64 x 64" not in text


def test_pictures_come_in_the_size_of_their_bucket_and_batches_are_of_one(tmp_path: Path) -> None:
    for number in range(8):
        wide = number % 3 == 0
        (tmp_path / f"{number}.png").write_bytes(picture(number, *(24, 12) if wide else (12, 12)))
        (tmp_path / f"{number}.txt").write_text(f"number {number}")
    rule = BucketRule(sizes=((8, 8), (4, 12)))
    source = open_shards([folder_shard(tmp_path)], "", size=8, buckets=rule)
    assert source[0].image.shape == (4, 12, 3) and source[1].image.shape == (8, 8, 3)
    noise = Image.open(tmp_path / "0.png")
    # 24 x 12 covers 12 x 4 at half its size: 12 x 6, of which the middle four rows are kept.
    expected = np.asarray(noise.resize((12, 6), Image.Resampling.LANCZOS).crop((0, 1, 12, 5)), int)
    assert np.abs(source[0].image - expected).max() <= 1, "8-bit rounding between the two passes, in other order"
    made = batches(source, batch_size=2, seed=0, epochs="one", buckets=source.buckets.of)
    rows = [(batch.images.shape, batch.keys) for batch in made]
    assert sorted(shape for shape, _ in rows) == [(2, 4, 12, 3)] * 2 + [(2, 8, 8, 3)] * 3
    threads = [(batch.images.shape, batch.keys) for batch in made.iterate(num_threads=3)]
    assert threads == rows
    assert math.isclose(made.steps_per_epoch, 4)
