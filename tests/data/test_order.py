"""Every sample exactly once an epoch, of every bucket, on any number of hosts, also when their number changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxdiffusion.data.order import BatchOrder


def order(buckets, **arguments) -> BatchOrder:
    return BatchOrder(np.array(buckets), **{"batch_size": 4, "seed": 0, "shuffled": True, "endless": True, **arguments})


def steps(of: BatchOrder, number: int) -> list[list[int]]:
    return [of.rows(step, slice(None)).index.tolist() for step in range(number)]


def mixed(*counts: int, seed: int = 0) -> np.ndarray:
    """Buckets of these sizes, in no order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    batch_size=st.sampled_from([2, 4, 12]),
    seed=st.integers(0, 2**32 - 1),
)
def test_after_whole_epochs_every_full_batch_has_been_given_and_no_more(counts, batch_size, seed) -> None:
    buckets = mixed(*counts, seed=seed % 1000)
    of = order(buckets, batch_size=batch_size, seed=seed)
    epochs = 2
    number = sum(epochs * count // batch_size for count in counts)
    batches = steps(of, number)
    for bucket, count in enumerate(counts):
        rows = [index for batch in batches if buckets[batch[0]] == bucket for index in batch]
        assert len(rows) == epochs * count // batch_size * batch_size
        assert all(buckets[index] == bucket for index in rows)
        seen = Counter(rows)
        assert max(seen.values(), default=0) <= epochs
        # What is missing is in the batch that goes over the border: less than one.
        assert epochs * count - sum(seen.values()) < batch_size


@settings(max_examples=12, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=4), batch_size=st.sampled_from([2, 4, 12]))
def test_one_epoch_has_each_sample_once_and_the_rest_without_weight(counts, batch_size) -> None:
    buckets = mixed(*counts)
    of = order(buckets, batch_size=batch_size, endless=False)
    assert of.num_steps == sum(-(-count // batch_size) for count in counts)
    rows = [of.rows(step, slice(None)) for step in range(of.num_steps)]
    seen = Counter(int(index) for one in rows for index in one.index[one.weight > 0])
    assert seen == Counter(range(sum(counts)))
    assert all(len(set(buckets[one.index])) == 1 for one in rows)


@pytest.mark.parametrize("endless", [True, False])
def test_hosts_may_change_in_the_middle_of_an_epoch(endless: bool) -> None:
    """2 hosts, then 1, then 4: each asks only for its own rows, and together they give each sample once."""
    buckets = mixed(16, 8, 24) if endless else mixed(13, 6, 21)
    hosts = [2, 2, 2, 1, 1, 1, 4, 4, 4, 4, 4, 4]
    total = 12 if endless else order(buckets, endless=False).num_steps
    assert total is not None and total <= len(hosts)
    seen: Counter[int] = Counter()
    for step, number in enumerate(hosts[:total]):
        shapes = set()
        for host in range(number):
            rows = order(buckets, endless=endless).rows(step, slice(host * 4 // number, (host + 1) * 4 // number))
            seen.update(rows.index[rows.weight > 0].tolist())
            shapes |= set(buckets[rows.index].tolist())
        assert len(shapes) == 1, "all hosts of a step are in one bucket"
    assert seen == Counter(range(len(buckets)))


def test_one_bucket_is_the_plain_stream_and_others_do_not_change_it() -> None:
    alone = steps(order([0] * 10), 25)
    assert sorted(index for batch in alone for index in batch) == sorted(list(range(10)) * 10)
    of = order([0] * 10 + [1] * 7)
    both = [batch for batch in steps(of, 40) if batch[0] < 10]
    assert both[:20] == alone[:20]


def test_the_order_of_buckets_is_shuffled_anew_every_epoch_by_the_seed_alone() -> None:
    buckets = mixed(32, 32)
    of = order(buckets)
    epochs = [[of.bucket(16 * epoch + step) for step in range(16)] for epoch in range(4)]
    assert all(sorted(epoch) == [0] * 8 + [1] * 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = order(buckets)
    assert [again.bucket(step) for step in reversed(range(64))] == [b for epoch in epochs for b in epoch][::-1]
    assert [order(buckets, seed=1).bucket(step) for step in range(16)] != epochs[0]


def test_orders_stay_what_they_are() -> None:
    """A run that resumes with another version of anything must go on in the same order."""
    of = order([0, 0, 0, 1, 1, 0, 1, 0, 0, 0], batch_size=2, seed=7)
    assert [of.bucket(step) for step in range(10)] == [0, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    assert steps(of, 4) == [[7, 0], [6, 3], [5, 1], [2, 8]]


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=4), batch_size=st.sampled_from([2, 4, 12]))
def test_the_position_is_what_was_drawn(counts, batch_size) -> None:
    """Counted row by row, over three epochs with what each bucket carries from one into the next."""
    of, drawn, epoch = order(mixed(*counts), batch_size=batch_size), [0] * len(counts), 0
    borders = [sum(epochs * count // batch_size for count in counts) for epochs in range(1, 5)]
    for step in range(borders[2]):
        if len(counts) > 1:
            epoch = next(number for number, border in enumerate(borders) if step < border)
        else:
            epoch = step * batch_size // counts[0]
        found = of.position(step)
        assert (found.epoch, found.drawn, found.samples) == (epoch, tuple(drawn), tuple(counts))
        drawn[of.bucket(step)] += batch_size


def test_far_into_a_run_a_step_costs_nothing() -> None:
    of = order(mixed(1000, 500, 3))
    far = 10**9
    assert of.bucket(far) in (0, 1, 2) and len(of.rows(far, slice(None)).index) == 4


def test_buckets_come_one_after_the_other_in_the_order_of_the_source() -> None:
    assert steps(order([1, 0, 1, 0, 1, 0], batch_size=2, shuffled=False, endless=False), 4) == [
        [1, 3],
        [5, 1],
        [0, 2],
        [4, 0],
    ]
