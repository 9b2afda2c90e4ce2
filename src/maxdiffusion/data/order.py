"""Which samples make up which batch: a pure function of (seed, step), each sample exactly once an epoch, by bucket.

The samples of a bucket form one endless stream: epoch after epoch, each a fresh permutation made from an index and a
seed (Grain's index shuffle). The batches of a bucket are this stream, cut; a batch that begins in one epoch and ends in
the next is full. After e epochs the bucket has given `floor(e * samples / batch_size)` batches, and the batches that
fall into one epoch, of all buckets, come in an order that again only the seed and the epoch decide. So all hosts agree
about the shape of every step without a word between them, and none keeps a state. With one bucket this is the stream
itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import grain
import numpy as np
from jaxtyping import Float32, Int, Int64


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one batch.

    Attributes:
        index: which samples of the source.
        weight: 1, or 0 for rows that only fill the batch up.
    """

    index: Int64[np.ndarray, " rows"]
    weight: Float32[np.ndarray, " rows"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far an endless order has come before a step.

    Attributes:
        epoch: that the next step counts to.
        drawn: rows that each bucket has given, over all epochs; `drawn // samples` is its epoch, the rest its place.
        samples: of each bucket.
    """

    epoch: int
    drawn: tuple[int, ...]
    samples: tuple[int, ...]


class BatchOrder:
    """The samples of every step.

    Attributes:
        num_steps: batches there are; None without end.
    """

    def __init__(
        self, buckets: Int[np.ndarray, " n"], *, batch_size: int, seed: int, shuffled: bool, endless: bool
    ) -> None:
        """Sorts the samples.

        Args:
            buckets: which bucket each sample is in; all are used, from 0 on.
            batch_size: rows of a global batch.
            seed: decides every order.
            shuffled: else samples come in the order of the source, and buckets one after the other.
            endless: else one epoch, the last batch of each bucket filled up with rows of weight 0.
        """
        self._members = [np.flatnonzero(buckets == bucket) for bucket in range(int(buckets.max()) + 1)]
        self._batch_size, self._seed, self._shuffled, self._endless = batch_size, seed, shuffled, endless
        ranges = [grain.MapDataset.range(len(members)) for members in self._members]
        self._streams = [(one.shuffle(seed=seed) if shuffled else one).repeat(None) for one in ranges]
        self.num_steps = None if endless else self._before(1)
        self._epoch = functools.lru_cache(maxsize=2)(self._sequence)

    def bucket(self, step: int) -> int:
        """The bucket of a step."""
        return self._find(step)[0]

    def rows(self, step: int, rows: slice) -> Rows:
        """Some rows of the batch of a step.

        Args:
            step: which batch.
            rows: a slice of `range(batch_size)`.
        """
        bucket, number = self._find(step)
        members, stream = self._members[bucket], self._streams[bucket]
        places = number * self._batch_size + np.arange(self._batch_size, dtype=np.int64)[rows]
        index = np.array([members[stream[int(place)]] for place in places], np.int64)
        counts = np.ones(len(places), bool) if self._endless else places < len(members)
        return Rows(index=index, weight=counts.astype(np.float32))

    def position(self, step: int) -> Position:
        """How far the order has come before a step."""
        samples = tuple(map(len, self._members))
        if len(samples) == 1:
            rows = step * self._batch_size
            return Position(epoch=rows // samples[0], drawn=(rows,), samples=samples)
        epoch = self._epoch_of(step)
        begun = self._epoch(epoch)[0][: step - self._before(epoch)]
        given = [self._batches(bucket, epoch) + int((begun == bucket).sum()) for bucket in range(len(samples))]
        return Position(epoch=epoch, drawn=tuple(self._batch_size * number for number in given), samples=samples)

    def _batches(self, bucket: int, epochs: int) -> int:
        """Batches of a bucket that have begun and ended before an epoch."""
        rows = epochs * len(self._members[bucket])
        return rows // self._batch_size if self._endless else -(-rows // self._batch_size)

    def _before(self, epochs: int) -> int:
        """Steps before an epoch."""
        return sum(self._batches(bucket, epochs) for bucket in range(len(self._members)))

    def _find(self, step: int) -> tuple[int, int]:
        """Bucket of a step, and how many batches the bucket has given before."""
        if len(self._members) == 1:
            return 0, step
        epoch = self._epoch_of(step)
        buckets, earlier = self._epoch(epoch)
        place = step - self._before(epoch)
        bucket = int(buckets[place])
        return bucket, self._batches(bucket, epoch) + int(earlier[place])

    def _epoch_of(self, step: int) -> int:
        """The epoch that a step counts to."""
        if not self._endless:
            return 0
        epoch = step * self._batch_size // sum(map(len, self._members))
        while self._before(epoch + 1) <= step:
            epoch += 1
        return epoch

    def _sequence(self, epoch: int) -> tuple[Int[np.ndarray, " steps"], Int[np.ndarray, " steps"]]:
        """For every step of an epoch its bucket, and how many steps of the bucket came before it in the epoch."""
        numbers = range(len(self._members))
        counts = [self._batches(bucket, epoch + 1) - self._batches(bucket, epoch) for bucket in numbers]
        buckets = np.repeat(np.arange(len(counts)), counts)
        if self._shuffled:
            buckets = buckets[np.argsort(_hashes(len(buckets), self._seed, epoch), kind="stable")]
        earlier = np.zeros(len(buckets), np.int64)
        for bucket in numbers:
            own = buckets == bucket
            earlier[own] = np.arange(own.sum())
        return buckets, earlier


def _hashes(number: int, seed: int, epoch: int) -> Int[np.ndarray, " number"]:
    """Pseudo-random numbers, the same for ever: SplitMix64 (Steele, Lea, Flood 2014) of seed, epoch and place."""
    start = _mixed(_mixed(np.array([seed], np.uint64)) + np.uint64(epoch))
    return _mixed(start + np.arange(number, dtype=np.uint64))


def _mixed(values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
