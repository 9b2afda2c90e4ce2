"""Batches as a pure function of (seed, step): any host asks for any step at any time and gets its share of that batch.

Which samples a step has is said by `BatchOrder`, so no buffer, no state and no worker has a say in it. Host i of n
takes the i-th n-th of its rows. Resuming is asking for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import grain
import numpy as np
from jaxtyping import Float32, Int, Int64

from maxdiffusion.data.order import BatchOrder, Position
from maxdiffusion.data.source import Source, to_float
from maxdiffusion.errors import UsageError, nearest

Order = Literal["shuffled", "source"]
Epochs = Literal["endless", "one"]

ENDLESS_ROWS = 2**52  # at a million rows a second this ends after 142 years


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One host's share of one global batch; all fields agree in their first dimension.

    Attributes:
        step: which global batch this belongs to.
        images: RGB in [-1, 1].
        captions: one an image.
        keys: the samples' names.
        index: which sample of the source this is.
        position: the *global sample index*, `step * batch_size + row`: unique in a run, the same on any number of
            hosts. Draw noise from (seed, step, position), not from `index`, which can come twice in a batch that spans
            two epochs.
        weight: 1, or 0 for rows that only fill up the last batch of a single epoch; leave those out of every mean.
    """

    step: int
    images: Float32[np.ndarray, "batch height width 3"]
    captions: tuple[str, ...]
    keys: tuple[str, ...]
    index: Int64[np.ndarray, " batch"]
    position: Int64[np.ndarray, " batch"]
    weight: Float32[np.ndarray, " batch"]

    def __len__(self) -> int:
        return len(self.captions)


class Batches:
    """What `batches` returns: `[step]` gives a batch, `iterate(start)` gives one after the other.

    Attributes:
        batch_size: rows of a global batch, over all hosts.
        num_samples: samples of the source, that is of an epoch.
    """

    def __init__(self, stream: grain.MapDataset[Batch], *, num_samples: int, batch_size: int, order: BatchOrder):
        self._stream = stream
        self._order = order
        self._num_steps = order.num_steps
        self.num_samples = num_samples
        self.batch_size = batch_size

    @property
    def steps_per_epoch(self) -> float:
        """Global batches to one pass over the source; a fraction where the batch size does not divide."""
        return self.num_samples / self.batch_size

    def position(self, step: int) -> Position:
        """How far the samples of each bucket are drawn before a step."""
        return self._order.position(step)

    def __len__(self) -> int:
        if self._num_steps is None:
            raise TypeError("these batches have no end: ask for a step, or make them with epochs='one'")
        return self._num_steps

    def __getitem__(self, step: int, /) -> Batch:
        if step < 0 or (self._num_steps is not None and step >= self._num_steps):
            raise IndexError(f"step {step} is not in 0..{'' if self._num_steps is None else self._num_steps - 1}")
        batch = self._stream[step]
        assert batch is not None, "only filters make holes, and there is none"
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()

    def iterate(self, start: int = 0, *, num_threads: int = 0, buffer_size: int = 4) -> Iterator[Batch]:
        """Batches from step `start` on, in order.

        Args:
            start: the first step.
            num_threads: threads that make batches ahead of time (for sources that read files); 0 makes each when it is
                asked for. The batches are the same.
            buffer_size: how many batches may wait, with threads; at least one a thread.
        """
        if num_threads:
            options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(buffer_size, num_threads))
            yield from self._stream.slice(slice(start, None)).to_iter_dataset(options)
            return
        step = start
        while self._num_steps is None or step < self._num_steps:
            yield self[step]
            step += 1


def batches(
    source: Source,
    *,
    batch_size: int,
    seed: int,
    order: Order = "shuffled",
    epochs: Epochs = "endless",
    shard_index: int = 0,
    num_shards: int = 1,
    buckets: Int[np.ndarray, " n"] | None = None,
) -> Batches:
    """Cut a source into batches; each sample comes exactly once an epoch, for any number of hosts.

    Args:
        source: where samples come from.
        batch_size: rows of a global batch. A host's batch has `batch_size // num_shards` of them.
        seed: decides the order of every epoch; 0 to 2^32 - 1.
        order: `shuffled` anew every epoch, or as in the `source`.
        epochs: `endless` goes on over the end of an epoch in the middle of a batch; `one` stops after one, the last
            batch (of each bucket) filled up with rows of weight 0.
        shard_index, num_shards: which host this is, of how many (`jax.process_index()`, `jax.process_count()`).
        buckets: which bucket each sample is in, where pictures have several sizes: a batch is of one bucket.

    Raises:
        UsageError: an empty source, a batch that does not divide by the hosts, values out of range.
    """
    if order not in get_args(Order):
        raise UsageError(f"unknown order '{order}': {nearest(order, get_args(Order))}")
    if epochs not in get_args(Epochs):
        raise UsageError(f"unknown epochs '{epochs}': {nearest(epochs, get_args(Epochs))}")
    if not len(source):
        raise UsageError("the source has no samples, so there is nothing to make batches from")
    if not 0 <= shard_index < num_shards:
        raise UsageError(f"shard_index is {shard_index}: with num_shards={num_shards} it must be 0 to {num_shards - 1}")
    if batch_size < 1 or batch_size % num_shards:
        lower = batch_size // num_shards * num_shards
        legal = f"{lower} or {lower + num_shards}" if lower > 0 else str(num_shards)
        raise UsageError(f"batch_size {batch_size} does not divide over {num_shards} hosts: take {legal}")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed {seed} is out of range: take one from 0 to {2**32 - 1}")

    num_samples, per_host = len(source), batch_size // num_shards
    if buckets is None:
        buckets = np.zeros(num_samples, np.int32)
    order_of = BatchOrder(
        buckets, batch_size=batch_size, seed=seed, shuffled=order == "shuffled", endless=epochs == "endless"
    )
    own = slice(shard_index * per_host, (shard_index + 1) * per_host)

    def make(step: int) -> Batch:
        rows = order_of.rows(step, own)
        samples = [source[int(index)] for index in rows.index]
        return Batch(
            step=step,
            images=to_float(np.stack([sample.image for sample in samples])),
            captions=tuple(sample.caption for sample in samples),
            keys=tuple(sample.key for sample in samples),
            index=rows.index,
            position=step * batch_size + np.arange(own.start, own.stop, dtype=np.int64),
            weight=rows.weight,
        )

    num_steps = order_of.num_steps
    stream = grain.MapDataset.range(ENDLESS_ROWS // batch_size if num_steps is None else num_steps).map(make)
    return Batches(stream, num_samples=num_samples, batch_size=batch_size, order=order_of)
