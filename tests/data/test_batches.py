"""Batches are a pure function of (seed, step), whatever the number of hosts."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from maxdiffusion.data.batches import Batch, batches
from maxdiffusion.data.source import Sample
from maxdiffusion.errors import UsageError


@dataclass(frozen=True)
class Counting:
    """A source whose pictures carry their own index (modulo 256)."""

    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int, /) -> Sample:
        assert isinstance(index, int) and 0 <= index < self.number
        return Sample(image=np.full((2, 2, 3), index % 256, np.uint8), caption=f"number {index}", key=str(index))


def same(one: Batch, other: Batch) -> bool:
    arrays = ("images", "index", "position", "weight")
    texts = ("step", "captions", "keys")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and all(
        getattr(one, name) == getattr(other, name) for name in texts
    )


def test_fields_belong_together():
    batch = batches(Counting(10), batch_size=4, seed=0)[3]
    assert len(batch) == 4 and batch.step == 3
    assert batch.images.dtype == np.float32 and batch.images.shape == (4, 2, 2, 3)
    assert np.array_equal(np.rint((batch.images[:, 0, 0, 0] + 1) * 127.5), batch.index)
    assert batch.captions == tuple(f"number {index}" for index in batch.index)
    assert batch.keys == tuple(str(index) for index in batch.index)
    assert batch.position.tolist() == [12, 13, 14, 15]
    assert batch.weight.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 32])
def test_every_sample_once_an_epoch_also_across_its_border(batch_size: int):
    made = batches(Counting(12), batch_size=batch_size, seed=5)
    steps = -(-36 // batch_size)
    seen = np.concatenate([made[step].index for step in range(steps)])[:36].reshape(3, 12)
    assert (np.sort(seen, axis=1) == np.arange(12)).all()
    assert len({tuple(epoch) for epoch in seen}) == 3, "every epoch has an order of its own"
    assert made.steps_per_epoch == 12 / batch_size


def test_batch_size_does_not_change_the_stream():
    small = np.concatenate([batches(Counting(9), batch_size=2, seed=1)[step].index for step in range(12)])
    large = np.concatenate([batches(Counting(9), batch_size=8, seed=1)[step].index for step in range(3)])
    assert np.array_equal(small, large)


def test_any_step_in_any_order_is_the_same_batch():
    made = batches(Counting(11), batch_size=4, seed=2)
    forwards = [made[step] for step in range(8)]
    backwards = [batches(Counting(11), batch_size=4, seed=2)[step] for step in reversed(range(8))]
    assert all(same(one, other) for one, other in zip(forwards, reversed(backwards), strict=True))
    assert not np.array_equal(forwards[0].index, batches(Counting(11), batch_size=4, seed=3)[0].index)


def test_resuming_far_into_a_run_costs_nothing_and_is_exact():
    made = batches(Counting(1000), batch_size=8, seed=0)
    epochs = 12_345_678
    seen = np.concatenate([made[epochs * 125 + step].index for step in range(125)])
    assert (np.sort(seen) == np.arange(1000)).all()
    assert made[epochs * 125].position[0] == epochs * 1000


@pytest.mark.parametrize("num_shards", [2, 3, 6])
def test_hosts_in_order_make_up_the_global_batch(num_shards: int):
    whole = batches(Counting(13), batch_size=6, seed=4)
    parts = [
        batches(Counting(13), batch_size=6, seed=4, shard_index=host, num_shards=num_shards)
        for host in range(num_shards)
    ]
    for step in (0, 1, 2, 17):
        shares = [part[step] for part in parts]
        assert {share.step for share in shares} == {step}
        assert {len(share) for share in shares} == {6 // num_shards}
        for field in ("index", "position", "images"):
            joined = np.concatenate([getattr(share, field) for share in shares])
            assert np.array_equal(joined, getattr(whole[step], field))


def test_number_of_hosts_may_change_in_the_middle_of_an_epoch():
    """Two hosts for three steps, then four: each sample still exactly once."""
    hosts = [2, 2, 2, 4, 4, 4]
    seen = Counter(
        int(index)
        for step, number in enumerate(hosts)
        for host in range(number)
        for index in batches(Counting(24), batch_size=4, seed=9, shard_index=host, num_shards=number)[step].index
    )
    assert seen == Counter(range(24))


def test_one_epoch_is_filled_up_with_rows_of_no_weight():
    made = batches(Counting(10), batch_size=4, seed=0, order="source", epochs="one")
    assert len(made) == 3
    batch = made[2]
    assert batch.index[:2].tolist() == [8, 9] and batch.weight.tolist() == [1, 1, 0, 0]
    seen = np.concatenate([batch.index[batch.weight > 0] for batch in made])
    assert seen.tolist() == list(range(10))
    with pytest.raises(IndexError, match="step 3"):
        made[3]


def test_one_epoch_over_hosts_never_lacks_a_batch():
    """Five samples over four hosts: the last host's share is all padding, and it is there, so nobody waits for ever."""
    parts = [
        batches(Counting(5), batch_size=4, seed=0, epochs="one", shard_index=host, num_shards=4) for host in range(4)
    ]
    assert [len(part) for part in parts] == [2] * 4
    assert [float(part[1].weight[0]) for part in parts] == [1, 0, 0, 0]
    assert sorted(int(batch.index[0]) for part in parts for batch in part if batch.weight[0]) == list(range(5))


def test_iterating_from_a_step_with_and_without_threads():
    made = batches(Counting(10), batch_size=4, seed=7)
    expected = [made[step] for step in range(5, 11)]
    for threads in (0, 2):
        found = [batch for batch, _ in zip(made.iterate(5, num_threads=threads), range(6), strict=False)]
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    single = batches(Counting(10), batch_size=4, seed=7, epochs="one")
    assert [batch.step for batch in single.iterate(1, num_threads=1)] == [1, 2]
    assert [batch.step for batch in single.iterate()] == [0, 1, 2]


def test_a_fault_in_the_source_reaches_the_caller_through_threads():
    class Faulty(Counting):
        def __getitem__(self, index: int, /) -> Sample:
            raise UsageError(f"picture {index} is gone")

    with pytest.raises(UsageError, match="is gone"):
        next(batches(Faulty(3), batch_size=2, seed=0).iterate(num_threads=1))


def test_endless_batches_have_no_length():
    with pytest.raises(TypeError, match="no end"):
        len(batches(Counting(3), batch_size=2, seed=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "does not divide"),
        ({"batch_size": 7, "num_shards": 2}, "take 6 or 8"),
        ({"batch_size": 1, "num_shards": 2}, "take 2"),
        ({"shard_index": 2, "num_shards": 2}, "must be 0 to 1"),
        ({"seed": -1}, "out of range"),
        ({"seed": 2**32}, "out of range"),
        ({"order": "shuffle"}, "did you mean 'shuffled'"),
        ({"epochs": "once"}, "unknown epochs"),
    ],
)
def test_mistakes_say_what_would_work(arguments: dict, message: str):
    with pytest.raises(UsageError, match=message):
        batches(Counting(5), **{"batch_size": 4, "seed": 0, **arguments})


def test_an_empty_source_is_an_error():
    with pytest.raises(UsageError, match="no samples"):
        batches(Counting(0), batch_size=4, seed=0)
