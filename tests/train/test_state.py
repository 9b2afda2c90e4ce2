"""Every leaf of the state has its sharding and its own buffers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import TrainSection
from tests.train.conftest import BATCH, Subject, make_subject


@pytest.fixture(scope="module")
def subject(fsdp_tensor: Mesh) -> Subject:
    return make_subject(fsdp_tensor)


def test_every_leaf_lives_where_the_plan_says(subject: Subject) -> None:
    state = subject.start()
    leaves, planned = jax.tree.leaves(state), jax.tree.leaves(subject.shapes)
    assert len(leaves) == len(planned) > 300
    for leaf, plan in zip(leaves, planned, strict=True):
        assert (leaf.shape, leaf.dtype) == (plan.shape, plan.dtype)
        assert leaf.sharding.is_equivalent_to(plan.sharding, leaf.ndim)


def test_moments_and_average_are_laid_out_as_the_weights(subject: Subject) -> None:
    shapes = subject.shapes
    moments = [leaf.sharding for leaf in jax.tree.leaves(shapes.opt_state) if leaf.ndim]
    weights = [leaf.sharding for leaf in jax.tree.leaves(shapes.params)]
    assert moments == 2 * weights
    assert [leaf.sharding for leaf in jax.tree.leaves(shapes.ema)] == weights
    assert any(not sharding.is_fully_replicated for sharding in weights)


def test_the_average_is_a_copy(subject: Subject) -> None:
    """The same buffer twice in a donated state is an error of the runtime."""
    state = subject.start()

    def buffers(tree: object) -> set[int]:
        return {
            shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
        }

    assert not buffers(state.params) & buffers(state.ema)
    for weight, average in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.ema), strict=True):
        np.testing.assert_array_equal(weight, average)


def test_no_average_is_kept_where_its_decay_is_zero(one_device: Mesh) -> None:
    subject = make_subject(one_device, TrainSection(batch_size=BATCH, ema_decay=0.0))
    assert subject.shapes.ema is None
    assert subject.start().ema is None
