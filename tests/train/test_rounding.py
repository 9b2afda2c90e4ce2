"""Stochastic rounding is right in the mean, the same on every mesh, and keeps steps that bfloat16 alone would lose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.diffusion.denoiser import Denoiser
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.pipelines.run_folder import read_weights, weight_shapes
from maxdiffusion.pipelines.text_to_image import TextToImage
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.rounding import stochastic, stored
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import train_step
from tests.train.conftest import BATCH, make_subject

ULP = 2.0**-7  # of bfloat16 between 1 and 2


@pytest.mark.parametrize("part", [0.0, 0.001, 0.25, 0.5, 0.9])
def test_the_mean_is_the_number(part: float) -> None:
    count = 40_000
    x = jnp.full(count, 1 + part * ULP, jnp.float32)
    found = np.asarray(stochastic(x, jax.random.bits(jax.random.key(1), (count,), jnp.uint16)), np.float64)
    assert set(found) <= {1.0, 1 + ULP}
    # Five standard deviations of a share of so many draws; the sixteen bits cut the chance to a multiple of 2^-16.
    spread = 5 * np.sqrt(part * (1 - part) / count) + 2.0**-16
    assert abs((found.mean() - 1) / ULP - part) <= spread
    negative = np.asarray(stochastic(-x, jax.random.bits(jax.random.key(1), (count,), jnp.uint16)), np.float64)
    np.testing.assert_array_equal(negative, -found)


def test_what_is_no_number_stays_it() -> None:
    odd = jnp.array([np.nan, np.inf, -np.inf, 0.0], jnp.float32)
    odd = jnp.concatenate([odd, jax.lax.bitcast_convert_type(jnp.array([0x7FFFFFFF], jnp.uint32), jnp.float32)])
    found = np.asarray(stochastic(odd, jnp.full(5, 0xFFFF, jnp.uint16)), np.float32)
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, 0.0, np.nan])


def test_bits_come_with_key_step_leaf_and_element_on_every_mesh(data_model: Mesh) -> None:
    x = jnp.full((16, 64), 1 + ULP / 2, jnp.float32)
    params, like = {"a": x, "b": x, "whole": x}, {"a": x.astype(jnp.bfloat16), "b": x.astype(jnp.bfloat16), "whole": x}

    @jax.jit
    def run(params, seed, step):
        return stored(params, like, "stochastic", key=jax.random.key(seed), step=step)

    once = run(params, 0, 3)
    assert once["whole"].dtype == jnp.float32
    placed = jax.device_put(params, NamedSharding(data_model, P("data", "model")))
    for name, other in run(placed, 0, 3).items():
        np.testing.assert_array_equal(other, once[name])
    for other in (once["b"], run(params, 0, 4)["a"], run(params, 1, 3)["a"], jnp.roll(once["a"], 1, axis=0)):
        # Independent draws of two values agree in half of 1024 places, with a standard deviation of 16.
        assert abs(np.sum(np.asarray(other) == np.asarray(once["a"])) - 512) < 80


class _Falling(TextToImage):
    """Predicts a number far above its target that rises with every weight, so that each step lowers them all."""

    def denoiser(self, params: object) -> Denoiser:
        total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(self.used(params)))

        def denoise(cache: object, x: jax.Array, timestep: jax.Array, cond: tuple) -> tuple[object, jax.Array]:
            return cache, jnp.broadcast_to(100 + 1e-3 * total, x.shape)

        return denoise


@pytest.fixture(scope="module")
def moved(one_device: Mesh) -> Callable[[TrainSection], tuple[np.ndarray, np.ndarray, np.dtype]]:
    """The weights before and after three steps of a section, those of at least 0.02, and the average's dtype."""

    subject = make_subject(one_device, dtype="bfloat16", weights_dtype="bfloat16")
    falling = _Falling(**vars(subject.objective.text_to_image))
    objective = dataclasses.replace(subject.objective, text_to_image=falling)
    examples, whole = subject.feed.shapes(BATCH, falling.image_shape), subject.shapes.step.sharding  # type: ignore[attr-defined]

    def run(section: TrainSection) -> tuple[np.ndarray, np.ndarray, np.dtype]:
        rule = optimizer(section)
        weights = {"layer": {"kernel": jax.random.uniform(jax.random.key(1), (128, 128), jnp.float32, -1.0, 1.0)}}
        state = TrainState(
            step=jnp.int32(0),
            params=jax.tree.map(lambda leaf: jnp.array(leaf, section.master_dtype), weights),
            opt_state=rule.init(weights),
            ema=jax.tree.map(jnp.copy, weights),
            key=jax.random.key(0),
        )
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), state)
        step = train_step(
            objective, rule, shapes=shapes, examples=examples, ema_decay=section.ema_decay, rounding=section.rounding
        )
        before = np.asarray(state.params["layer"]["kernel"], np.float64)
        for number in range(3):
            state, _ = step(state, subject.feed(subject.batches[number]))
        after, chosen = np.asarray(state.params["layer"]["kernel"], np.float64), np.abs(before) > 0.02
        return before[chosen], after[chosen], jax.tree.leaves(state.ema)[0].dtype

    return run


def _section(**values) -> TrainSection:
    return TrainSection(
        batch_size=BATCH, learning_rate=1e-5, warmup_steps=0, weight_decay=0.0, grad_clip=None, ema_decay=0.9, **values
    )


def test_a_small_learning_rate_moves_float32_weights_under_bfloat16_compute(moved) -> None:
    before, after, average = moved(_section())
    # Adam's steps are as long as the learning rate where gradients keep their sign; float32 rounds at 1e-7.
    np.testing.assert_allclose(after - before, -3e-5, atol=1e-6)
    assert average == jnp.float32


def test_bfloat16_weights_stand_still_when_rounded_to_the_nearest(moved) -> None:
    with pytest.warns(MaxDiffusionWarning, match="rounding=nearest: bfloat16 weights lose every step"):
        before, after, _ = moved(_section(master_dtype="bfloat16", rounding="nearest"))
    np.testing.assert_array_equal(after, before)


def test_bfloat16_weights_move_in_the_mean_when_rounded_at_random(moved) -> None:
    before, after, average = moved(_section(master_dtype="bfloat16"))
    assert 0 < np.mean(after != before) < 0.2  # few move, each by much more than the step
    # A step of s in a grid of d moves by d with chance s / d: variance at most s d, three times; five deviations.
    spread = 5 * np.sqrt(np.mean(3 * 1e-5 * 2.0**-7 * np.abs(before)) / before.size)
    assert abs(np.mean(after - before) + 3e-5) < spread < 1.5e-5
    assert average == jnp.float32


def test_a_run_without_averages_is_read_in_its_own_dtype_alone(one_device: Mesh, tmp_path: Path) -> None:
    subject = make_subject(one_device, TrainSection(batch_size=BATCH, master_dtype="bfloat16", ema_decay=0.0))
    state = subject.start()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.close()
    like = weight_shapes(subject.objective.text_to_image.model)
    params, step = read_weights(tmp_path, like, master_dtype=jnp.bfloat16)
    assert step == 0
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(UsageError, match=r"in bfloat16, and float32 is wanted"):
        read_weights(tmp_path, like)
