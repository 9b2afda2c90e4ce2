"""From a recipe's data section to batches on the devices: sources, words, and where each array lies."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from maxdiffusion.config.schema import DataSection
from maxdiffusion.data.batches import Batch, Batches, batches
from maxdiffusion.data.buckets import BucketRule, Buckets, aspect_sizes
from maxdiffusion.data.folder import folder_shard
from maxdiffusion.data.index import Shard
from maxdiffusion.data.pictures import Pictures, Split, pictures
from maxdiffusion.data.records import record_shards
from maxdiffusion.data.shards import ShardedPictures, open_shards
from maxdiffusion.data.source import Source
from maxdiffusion.data.tables import Columns, arrow_shards, parquet_shards
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.data.webdataset import tar_shards
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.multihost import share_of
from maxdiffusion.parallel.rules import axes_of
from maxdiffusion.train.step import Examples

SHORTEST_TEXT = 16
"""Ids of a text, at least; longer captions make it longer, in steps of 8."""


def training_source(section: DataSection) -> Pictures | ShardedPictures:
    """The pictures that are learnt from.

    Raises:
        UsageError: they cannot be read, or none is left.
    """
    if section.source == "pictures":
        return built_in(section, section.split)
    assert section.path is not None, "the section checks it"
    return open_shards(
        _shards(section),
        section.path if isinstance(section.path, str) else ", ".join(section.path),
        size=section.size,
        on_broken=section.on_broken,
        num_threads=reading_threads(section),
        index_folder=None if section.index_folder is None else Path(section.index_folder),
        buckets=_bucket_rule(section),
    )


def _bucket_rule(section: DataSection) -> BucketRule | None:
    """The sizes that pictures may be given in; None for one square."""
    if section.buckets is None:
        return None
    if section.buckets == "aspect":
        return BucketRule(sizes=aspect_sizes(section.size, section.bucket_step), limit=section.max_buckets)
    return BucketRule(sizes=section.bucket_sizes)


def _shards(section: DataSection) -> Sequence[Shard]:
    """The files of a section, of any format."""
    path, columns = section.path, Columns(image=section.image_field, caption=section.caption_field)
    assert path is not None, "the section checks it"
    match section.source:
        case "webdataset":
            return tar_shards(path, caption_field=columns.caption)
        case "arrow":
            return arrow_shards(path, columns=columns)
        case "parquet":
            return parquet_shards(path, columns=columns)
        case "array_record":
            return record_shards(path)
    return [folder_shard(str(path))]


def reading_threads(section: DataSection) -> int:
    """Threads that read ahead: as the section says, else four for files and none for what is in memory anyway."""
    if section.num_threads is not None:
        return section.num_threads
    return 0 if section.source == "pictures" else 4


def held_out_source(section: DataSection) -> Pictures | None:
    """The held-out pictures of the built-in set; None for a folder, for a training on them, or where none is left."""
    if section.source != "pictures" or section.split != "train":
        return None
    try:
        return built_in(section, "held_out")
    except UsageError:  # the few concepts chosen lose no pair
        return None


def measured_source(section: DataSection, *, eval_every: int) -> Pictures | None:
    """The held-out pictures that a training is measured on as it goes; None where it is not.

    Args:
        section: of the data.
        eval_every: steps between measurements; 0 for none.

    Warns:
        MaxDiffusionWarning: they are asked for, and nothing is held out.
    """
    found = held_out_source(section) if eval_every else None
    if eval_every and found is None:
        if section.source != "pictures":
            why = f"data.source={section.source} has no held-out pairs, only the built-in pictures have"
        elif section.split != "train":
            why = f"data.split={section.split} trains on the held-out pairs: write data.split=train"
        else:
            why = "the concepts and styles chosen have no held-out pair"
        text = f"train.eval_every={eval_every} measures nothing: {why}; train.eval_every=0 says that none is wanted"
        warnings.warn(text, MaxDiffusionWarning, stacklevel=2)
    return found


def built_in(section: DataSection, split: Split) -> Pictures:
    """The built-in pictures that the section selects, of one split."""
    return pictures(section.concepts, styles=section.styles, size=section.size, split=split)


def captions_of(source: Source) -> list[str]:
    """Every caption of a source."""
    captions = getattr(source, "captions", None)
    return list(captions) if captions is not None else [source[index].caption for index in range(len(source))]


def learn_words(captions: list[str]) -> WordTokenizer:
    """The tokenizer of these captions, long enough for all of them.

    Raises:
        UsageError: there are no words.
    """
    probe = WordTokenizer.train(captions, max_length=10_000)
    longest = 1 + max(len(probe.split(caption)) for caption in captions)
    return WordTokenizer(model=probe.model, max_length=max(SHORTEST_TEXT, -(-longest // 8) * 8))


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Puts a host's batch on the devices.

    Attributes:
        tokenizer: of the captions.
        images: sharding of the images.
        rows: sharding of what has one row a sample.
        batch_size: over all hosts.
    """

    tokenizer: WordTokenizer
    images: NamedSharding
    rows: NamedSharding
    batch_size: int

    @property
    def share(self) -> tuple[int, int]:
        """`(shard_index, num_shards)` of the batches that this host must read: hosts that repeat a batch share one."""
        return share_of(self.rows, (self.batch_size,))

    def __call__(self, batch: Batch) -> Examples:
        """The batch laid out; every host gives its share."""
        ids, mask = self.tokenizer.encode(batch.captions)
        # The step is part of every key too, so that an index may come again after 2^31 samples.
        index = (batch.position % 2**31).astype(np.int32)
        return Examples(
            images=self._place(batch.images, self.images),
            ids=self._place(ids, self.rows),
            mask=self._place(mask, self.rows),
            index=self._place(index, self.rows),
            weight=self._place(batch.weight, self.rows),
        )

    def batches(self, source: Source, *, seed: int, buckets: Buckets | None = None) -> Batches:
        """This host's share of the batches of a training, without end.

        Args:
            source: of the pictures.
            seed: decides their order.
            buckets: which size each picture has; None where all have one.
        """
        shard, num_shards = self.share
        return batches(
            source,
            batch_size=self.batch_size,
            seed=seed,
            buckets=None if buckets is None else buckets.of,
            shard_index=shard,
            num_shards=num_shards,
        )

    def _place(self, local: np.ndarray, sharding: NamedSharding) -> Array:
        """This host's rows as its part of the whole array."""
        shard, _ = self.share
        first = shard * len(local)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(self.batch_size)
            return local[(slice(start - first, stop - first), *index[1:])]

        shape = (self.batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)  # type: ignore[arg-type]

    def shapes(self, batch_size: int, image_shape: tuple[int, int, int]) -> Examples:
        """A batch as `jax.ShapeDtypeStruct`s with their shardings.

        Args:
            batch_size: over all hosts.
            image_shape: height, width and channels.
        """

        def rows(*shape: int, dtype: type) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=self.rows)

        length = self.tokenizer.max_length
        images = jax.ShapeDtypeStruct((batch_size, *image_shape), np.float32, sharding=self.images)
        return Examples(
            images=images,  # type: ignore[arg-type]
            ids=rows(length, dtype=np.int32),  # type: ignore[arg-type]
            mask=rows(length, dtype=np.bool_),  # type: ignore[arg-type]
            index=rows(dtype=np.int32),  # type: ignore[arg-type]
            weight=rows(dtype=np.float32),  # type: ignore[arg-type]
        )


def make_feed(layout: Layout, tokenizer: WordTokenizer, *, batch_size: int, data_sharding: tuple | None = None) -> Feed:
    """The feed of a layout.

    Args:
        layout: says which mesh axes share the batch.
        tokenizer: of the captions.
        batch_size: over all hosts.
        data_sharding: mesh axes of each dimension of the images, in place of what the rules say.

    Raises:
        UsageError: the batch does not divide over the devices that share it.
    """
    cut = layout.resolve("activation_batch").axes if data_sharding is None else tuple(map(axes_of, data_sharding))
    images, rows = layout.along(cut), layout.along(cut[:1])
    assert images is not None and rows is not None, "training always has a mesh, of one device or more"
    feed = Feed(tokenizer=tokenizer, images=images, rows=rows, batch_size=batch_size)
    ways = layout.size(axis for axes in cut[:1] for axis in axes)
    if batch_size % ways:
        below = batch_size // ways * ways
        legal = f"{below} or {below + ways}" if below else f"{ways}"
        raise UsageError(
            f"train.batch_size={batch_size} does not divide by the {ways} devices that share a batch: take {legal}"
        )
    return feed
