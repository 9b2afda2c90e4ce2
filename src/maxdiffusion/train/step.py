"""One optimizer step: noise, times and dropped captions are functions of (seed, step, sample), the loss is float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.loss import denoising_loss, draw, weighted_sum
from maxdiffusion.diffusion.noise import sample_keys, stream
from maxdiffusion.diffusion.timesteps import TimeSampler, get_time_sampler
from maxdiffusion.pipelines.text_to_image import TextToImage
from maxdiffusion.train import ema
from maxdiffusion.train.state import TrainState


@struct.dataclass
class Examples:
    """A batch on the devices; all leaves agree in their first dimension.

    Attributes:
        images: (batch, height, width, channels), float32 in [-1, 1].
        ids: word ids, (batch, length).
        mask: True for ids that are no padding.
        index: global sample index, int32 (batch,).
        weight: 1, or 0 for what only fills the batch up, float32 (batch,).
    """

    images: Float[Array, "batch height width channels"]
    ids: Int[Array, "batch length"]
    mask: Bool[Array, "batch length"]
    index: Int[Array, " batch"]
    weight: Float[Array, " batch"]


class StepResult(NamedTuple):
    """What a step says: mean `loss` and `grad_norm` (before clipping), and the loss of each sample, all float32."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    losses: Float[Array, " batch"]


Step: TypeAlias = Callable[[TrainState, Examples], tuple[TrainState, StepResult]]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised.

    Attributes:
        text_to_image: network and process.
        times: draws the times of training.
        caption_dropout: share of samples whose caption becomes the empty text.
        empty: ids of the empty text; its mask is True on the first id alone.
    """

    text_to_image: TextToImage
    times: TimeSampler
    caption_dropout: float
    empty: tuple[int, ...]

    def losses(
        self, params: Any, examples: Examples, key: Key[Array, ""], step: Int[Array, ""]
    ) -> Float[Array, " batch"]:
        """The loss of each sample, float32.

        Args:
            params: float32 weights.
            examples: the batch.
            key: of the run.
            step: of training; with the sample's index it decides noise, time and dropped caption.
        """
        subject = self.text_to_image
        keys = sample_keys(stream(key, "caption"), examples.index, step=step)
        drop = jax.vmap(lambda one: jax.random.bernoulli(one, self.caption_dropout))(keys)[:, None]
        ids = jnp.where(drop, jnp.asarray([self.empty], examples.ids.dtype), examples.ids)
        mask = jnp.where(drop, jnp.arange(len(self.empty))[None] == 0, examples.mask)
        shape = examples.images.shape[1:]
        drawn = draw(key, examples.index, shape, process=subject.process, times=self.times, step=step)
        return denoising_loss(
            subject.denoiser(params),
            examples.images,
            (ids, mask),
            drawn,
            process=subject.process,
            prediction=subject.prediction,
        )


def objective_of(recipe: Recipe, text_to_image: TextToImage, tokenizer: WordTokenizer) -> Objective:
    """What a recipe says is minimised."""
    return Objective(
        text_to_image=text_to_image,
        times=get_time_sampler(recipe.diffusion.timesteps),
        caption_dropout=recipe.train.caption_dropout,
        empty=tuple(int(word) for word in tokenizer.encode([""])[0][0]),
    )


def train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    shapes: TrainState,
    examples: Examples,
    ema_decay: float,
) -> Step:
    """The jitted step `(state, examples) -> (state, result)`; it donates the state.

    Args:
        objective: what is minimised.
        optimizer: the rule of a step.
        shapes: from `state_shapes`; the state keeps these shardings.
        examples: `jax.ShapeDtypeStruct`s with the shardings of a batch.
        ema_decay: final decay of the averaged weights.
    """

    def step(state: TrainState, examples: Examples) -> tuple[TrainState, StepResult]:
        def mean_loss(params: Any) -> tuple[Array, Array]:
            losses = objective.losses(params, examples, state.key, state.step)
            total, count = weighted_sum(losses, examples.weight)
            return total / jnp.maximum(count, 1.0), losses

        (loss, losses), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = None if state.ema is None else ema.update(state.ema, params, ema.decay_at(state.step, ema_decay))
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=average)  # type: ignore[attr-defined]
        return new, StepResult(loss=loss, grad_norm=optax.tree.norm(gradients), losses=losses)

    state_shardings, batch_shardings = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (shapes, examples))
    whole = state_shardings.step
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_shardings),
        out_shardings=(state_shardings, StepResult(loss=whole, grad_norm=whole, losses=batch_shardings.weight)),
        donate_argnums=0,
    )
