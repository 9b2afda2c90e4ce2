"""A step is float32 where it matters, donates its state, and knows its samples by their index."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.diffusion.denoiser import Denoiser
from maxdiffusion.pipelines.text_to_image import TextToImage
from tests.train.conftest import BATCH, Subject, make_subject


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


def test_a_step_changes_everything_but_the_key_and_donates(subject: Subject) -> None:
    state = subject.start()
    # Copies: a view of a buffer would keep it from being donated.
    before = jax.tree.map(np.array, (state.params, state.ema, jax.random.key_data(state.key)))
    old = state
    new, result = subject.step(state, subject.feed(subject.batches[0]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert int(new.step) == 1
    assert result.losses.shape == (BATCH,)
    assert {leaf.dtype for leaf in jax.tree.leaves((result, new.params, new.ema))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(result.loss, np.mean(result.losses), rtol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(new.key), before[2])
    for old_leaf, leaf in zip(jax.tree.leaves(before[0]), jax.tree.leaves(new.params), strict=True):
        assert (old_leaf != np.asarray(leaf)).any()
    # The average's first decay is 1/10: nine tenths of the way to the new weights.
    for old_leaf, leaf, average in zip(*map(jax.tree.leaves, (before[0], new.params, new.ema)), strict=True):
        np.testing.assert_allclose(average, old_leaf + 0.9 * (np.asarray(leaf) - old_leaf), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_writes_its_state_over_the_old_one(sharded: bool, one_device: Mesh, fsdp_tensor: Mesh) -> None:
    """Of each device's shares of weights, optimizer state and averaged weights, no byte exists twice."""
    subject = make_subject(fsdp_tensor if sharded else one_device)
    examples = subject.feed.shapes(BATCH, subject.objective.text_to_image.image_shape)
    memory = subject.step.lower(subject.shapes, examples).compile().memory_analysis()  # type: ignore[attr-defined]

    def size(tree: object) -> int:
        shares = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shares)

    kept = size((subject.shapes.params, subject.shapes.opt_state, subject.shapes.ema))
    assert 4 * size(subject.shapes.params) <= kept <= memory.alias_size_in_bytes


def test_a_sample_has_the_same_loss_in_any_batch(subject: Subject) -> None:
    """Noise, time and dropped caption come with the sample's index, so order and company change nothing."""
    state = subject.start()
    examples = subject.feed(subject.batches[0])
    losses = jax.jit(subject.objective.losses)
    whole = np.asarray(losses(state.params, examples, state.key, state.step))
    turned = jax.tree.map(lambda leaf: jnp.roll(leaf, 3, axis=0), examples)
    # Convolutions over another order of the batch may round differently.
    np.testing.assert_allclose(losses(state.params, turned, state.key, state.step), np.roll(whole, 3), rtol=1e-5)
    other = np.asarray(losses(state.params, examples, state.key, state.step + 1))
    assert (np.abs(other - whole) > 1e-3 * whole).all()


def test_padding_counts_for_nothing(subject: Subject) -> None:
    batch = subject.batches[0]
    weight = np.array([1.0] * 5 + [0.0] * 3, np.float32)
    results = []
    for filling in (0.0, 1000.0):
        images = batch.images.copy()
        images[5:] = filling
        filled = dataclasses.replace(batch, images=images, weight=weight)
        results.append(subject.step(subject.start(), subject.feed(filled))[1])
    np.testing.assert_allclose(results[0].loss, np.mean(results[0].losses[:5]), rtol=1e-6)
    np.testing.assert_array_equal(results[0].losses[:5], results[1].losses[:5])
    np.testing.assert_allclose(results[0].grad_norm, results[1].grad_norm, rtol=1e-6)


class _CaptionSpy(TextToImage):
    """Predicts 1 where the caption was dropped, else 0."""

    def denoiser(self, params: object) -> Denoiser:
        def denoise(cache: object, x: jax.Array, timestep: jax.Array, cond: tuple) -> tuple[object, jax.Array]:
            dropped = (cond[1].sum(axis=1) == 1).astype(x.dtype)
            return cache, jnp.broadcast_to(dropped[:, None, None, None], x.shape)

        return denoise


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_of_dropped_captions(share: float, subject: Subject) -> None:
    spy = _CaptionSpy(**{**vars(subject.objective.text_to_image), "prediction": "sample"})
    objective = dataclasses.replace(subject.objective, text_to_image=spy, caption_dropout=share)
    examples = subject.feed(subject.batches[0])
    many = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 100), examples)
    many = many.replace(images=jnp.zeros_like(many.images), index=jnp.arange(100 * BATCH, dtype=jnp.int32))
    dropped = np.asarray(objective.losses({}, many, jax.random.key(0), jnp.int32(0)))
    # Four standard deviations of a share of 800 draws.
    assert abs(dropped.mean() - share) <= 4 * np.sqrt(share * (1 - share) / dropped.size)
