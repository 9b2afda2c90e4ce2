"""A step is float32 where it matters, donates its state, and knows its samples by their index."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import DiffusionSection, TrainSection
from maxdiffusion.data.batches import Batch
from maxdiffusion.diffusion.denoiser import Denoiser
from maxdiffusion.diffusion.timesteps import Biased, Cosine, LogitNormal, TimeSampler
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.text_to_image import TextToImage
from maxdiffusion.tools.traffic import traffic
from maxdiffusion.train.step import losses_by_time, time_sampler_of
from tests.train.conftest import BATCH, TINY, Subject, make_subject


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


def _parts(count: int, mesh: Mesh, **values: Any) -> Subject:
    """The tiny training with its batch worked off in parts."""
    section = TrainSection(
        batch_size=BATCH, learning_rate=1e-3, warmup_steps=2, ema_decay=0.9, accumulation_steps=count
    )
    return make_subject(mesh, section, **values)


def _ragged(batch: Batch) -> Batch:
    """Three rows fill the batch up; of four parts, one (rows 3 and 7) is made of nothing else."""
    weight = np.array([1, 1, 1, 0, 1, 0, 1, 0], np.float32)
    return dataclasses.replace(batch, weight=weight)


def _two_steps(subject: Subject) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], int]:
    """What two steps say, the losses of each sample, the gradients' average and the optimizer's count of steps."""
    state, results = subject.start(), []
    for number in range(2):
        state, result = subject.step(state, subject.feed(_ragged(subject.batches[number])))
        results.append(result)
    means = np.array([(result.loss, result.grad_norm, *result.bin_sums, *result.bin_counts) for result in results])
    # The bins hold the samples that count, once each, and their losses are the mean's.
    np.testing.assert_allclose([result.bin_counts.sum() for result in results], 5)
    np.testing.assert_allclose([result.bin_sums.sum() / 5 for result in results], means[:, 0], rtol=1e-5)
    moments = [np.asarray(leaf) for leaf in jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))]
    counts = {int(count) for _, count in optax.tree.get_all_with_path(state.opt_state, "count")}
    assert counts == {2}
    return means, np.stack([result.losses for result in results]), moments, counts.pop()


def _check_two_steps(found: tuple, wanted: tuple) -> None:
    """float32 sums in another order; the second step starts from weights that Adam has moved by these differences."""
    assert found[3] == wanted[3]
    np.testing.assert_allclose(found[0], wanted[0], rtol=2e-5)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in wanted[2]))
    for leaf, other in zip(found[2], wanted[2], strict=True):
        assert np.linalg.norm(leaf - other) <= 1e-4 * max(np.linalg.norm(other), 1e-3 * norm)


@pytest.fixture(scope="module")
def large_batch(subject: Subject):
    return _two_steps(subject)


@pytest.fixture(scope="module")
def halves(data_model: Mesh) -> Subject:
    return _parts(2, data_model)


@pytest.mark.parametrize("devices_used", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_parts_are_the_large_batch(devices_used: int, large_batch, halves: Subject, one_device: Mesh) -> None:
    """On one device and on eight, in steps that the schedule counts alike, with rows of weight 0 and a part of them."""
    _check_two_steps(_two_steps(_parts(4, one_device) if devices_used == 1 else halves), large_batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stack 'transformer_blocks' has 1 layer:maxdiffusion.errors.LayoutWarning")
@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        ({"fsdp": 4, "tensor": 2}, {}),
        ({"data": 4, "context": 2}, {}),  # rows of the feature maps, and the middle's attention in a ring
        ({"fsdp": 2, "context": 2, "tensor": 2}, {}),
        # The text transformer is the stack.
        ({"stage": 2, "data": 2, "tensor": 2}, {"scan_layers": True, "model_config": TINY | {"text_layers": 2}}),
    ],
    ids=["fsdp-tensor", "data-context", "fsdp-context-tensor", "stage-data-tensor"],
)
def test_parts_are_the_large_batch_on_other_meshes(
    sizes: dict[str, int], values: dict[str, Any], large_batch, one_device: Mesh, devices: np.ndarray
) -> None:
    """Where parts gather weights, exchange rows and keys, or are cut once more into a pipeline's microbatches."""
    mesh = Mesh(devices.reshape(*sizes.values()), tuple(sizes))
    whole = _two_steps(make_subject(one_device, **values)) if values else large_batch
    _check_two_steps(_two_steps(_parts(2, mesh, **values)), whole)


def test_gradients_of_parts_cross_the_batch_axis_once(halves: Subject, data_model: Mesh) -> None:
    """As float32, cut as the weights are: each device adds its own parts up first. No row changes its device."""
    examples = halves.feed.shapes(BATCH, halves.objective.text_to_image.image_shape)
    compiled = halves.step.lower(halves.shapes, examples).compile()  # type: ignore[attr-defined]
    moved = traffic(compiled.as_text(), data_model)
    shares = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(halves.shapes.params)]
    # Beside the gradients, a few sums over the samples: the loss, its bins, their counts.
    assert 4 * sum(shares) <= moved.bytes("all-reduce", ("data",)) <= 4 * sum(shares) + 200
    assert moved.count("all-reduce", ("data",), above=100) == sum(share > 25 for share in shares)
    for kind in ("all-to-all", "collective-permute", "all-gather"):
        assert moved.bytes(kind, ("data",)) == moved.bytes(kind, ("data", "model")) == 0


@pytest.mark.parametrize(
    ("parts", "words"),
    [(3, "accumulation_steps=2, or batch_size=12$"), (16, "accumulation_steps=2, or batch_size=64$")],
)
def test_a_cut_that_does_not_fit_is_refused_with_what_fits(parts: int, words: str, data_model: Mesh) -> None:
    with pytest.raises(UsageError, match=words):
        _parts(parts, data_model)


def test_losses_are_added_up_by_time() -> None:
    losses = jnp.array([1.0, 2.0, 4.0, jnp.nan, 8.0])
    times = jnp.array([0.0, 0.099, 0.1, 0.55, 1 - 2.0**-24])
    sums, counts = losses_by_time(losses, times, jnp.array([1.0, 1.0, 0.5, 0.0, 1.0]))
    np.testing.assert_allclose(sums, [3, 2, *[0] * 7, 8], rtol=1e-6)
    np.testing.assert_allclose(counts, [2, 0.5, *[0] * 7, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        (DiffusionSection(timesteps="cosine"), Cosine()),
        (DiffusionSection(timesteps="logit_normal", logit_mean=-0.5), LogitNormal(mean=-0.5)),
        (DiffusionSection(timesteps="earlier", timestep_bias_portion=0.4), Biased(begin=0.0, end=0.4)),
        (
            DiffusionSection(timesteps="later", timestep_bias_multiplier=3.0),
            Biased(begin=0.75, end=1.0, multiplier=3.0),
        ),
        (DiffusionSection(timesteps="later", timestep_bias_portion=0.5), Biased(begin=0.5, end=1.0)),
        (DiffusionSection(timesteps="range", timestep_bias_begin=0.1), Biased(begin=0.1, end=0.75)),
    ],
)
def test_time_samplers_have_the_settings_of_the_recipe(section: DiffusionSection, wanted: TimeSampler) -> None:
    assert time_sampler_of(section) == wanted


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
