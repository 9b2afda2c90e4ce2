"""One optimizer step: noise, times and dropped captions are functions of (seed, step, sample), the loss is float32."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from maxdiffusion.config.schema import DiffusionSection, Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.loss import denoising_loss, draw, weighted_sum
from maxdiffusion.diffusion.noise import sample_keys, stream
from maxdiffusion.diffusion.timesteps import Biased, LogitNormal, TimeSampler, get_time_sampler
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.parallel.accumulate import accumulate
from maxdiffusion.pipelines.text_to_image import TextToImage
from maxdiffusion.train import ema
from maxdiffusion.train.rounding import Rounding, stored
from maxdiffusion.train.state import TrainState

NUM_BINS = 10
"""Parts of all times, from the data to the noise, whose losses are added up apart."""


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
    """What a step says, all float32.

    Attributes:
        loss: mean over the samples.
        grad_norm: before clipping.
        losses: of each sample.
        bin_sums: sum of the losses of the samples in each tenth of the times, data first; weighted as the mean.
        bin_counts: sum of their weights.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    losses: Float[Array, " batch"]
    bin_sums: Float[Array, " bins"]
    bin_counts: Float[Array, " bins"]


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
            examples: the batch, or a part of it.
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


def time_sampler_of(section: DiffusionSection) -> TimeSampler:
    """The time sampler of a recipe with its settings.

    Raises:
        UsageError: the settings do not fit together.
    """
    sampler = get_time_sampler(section.timesteps)
    portion = section.timestep_bias_portion
    begin, end = section.timestep_bias_begin, section.timestep_bias_end
    if portion is not None:
        begin, end = (0.0, portion) if section.timesteps == "earlier" else (1.0 - portion, 1.0)
    given: dict[str, float | None] = {}
    if isinstance(sampler, LogitNormal):
        given = {"mean": section.logit_mean, "std": section.logit_std}
    elif isinstance(sampler, Biased):
        given = {"begin": begin, "end": end, "multiplier": section.timestep_bias_multiplier}
    return dataclasses.replace(sampler, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


def losses_by_time(
    losses: Float[Array, " batch"], times: Float[Array, " batch"], weights: Float[Array, " batch"]
) -> tuple[Float[Array, " bins"], Float[Array, " bins"]]:
    """(sums of weight x loss, sums of weights) of the samples in each of `NUM_BINS` equal parts of the times.

    Args:
        losses: of each sample; one of weight 0 counts for nothing, even if it is not finite.
        times: numbers in [0, 1) as the time sampler draws them, before the process's shift.
        weights: of each sample.
    """
    place = jnp.clip((times * NUM_BINS).astype(jnp.int32), 0, NUM_BINS - 1)
    share = jnp.where(place[:, None] == jnp.arange(NUM_BINS)[None], weights[:, None], 0.0)
    counted = jnp.where(weights > 0, losses, 0.0)
    return jnp.sum(share * counted[:, None], axis=0), jnp.sum(share, axis=0)


def objective_of(recipe: Recipe, text_to_image: TextToImage, tokenizer: WordTokenizer) -> Objective:
    """What a recipe says is minimised."""
    return Objective(
        text_to_image=text_to_image,
        times=time_sampler_of(recipe.diffusion),
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
    accumulation_steps: int = 1,
    rounding: Rounding | None = None,
) -> Step:
    """The jitted step `(state, examples) -> (state, result)`; it donates the state.

    A step whose loss or gradients are not finite leaves the state as it is, but for its number, which becomes `~step`;
    so do all steps after it (`failed_before` says how to read that). So the state before it outlives the steps that
    are handed out before the host looks at the losses, and nothing of it is kept twice.

    Args:
        objective: what is minimised.
        optimizer: the rule of a step.
        shapes: from `state_shapes`; the state keeps these shardings.
        examples: `jax.ShapeDtypeStruct`s with the shardings of a batch.
        ema_decay: final decay of the averaged weights.
        accumulation_steps: parts that the batch is worked off in; the same numbers, to the order of sums.
        rounding: of weights that are kept in bfloat16; None for stochastic.

    Raises:
        UsageError: the batch cannot be cut into so many parts.

    Warns:
        MaxDiffusionWarning: bfloat16 weights are rounded to the nearest.
    """
    if rounding == "nearest":
        warnings.warn(
            "train.rounding=nearest: bfloat16 weights lose every step below 1/512 of their size, which small learning "
            "rates never reach: take train.rounding=stochastic, or train.master_dtype=float32",
            MaxDiffusionWarning,
            stacklevel=2,
        )
    state_shardings, batch_shardings = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (shapes, examples))
    whole, rows = state_shardings.step, batch_shardings.weight
    (batch,) = examples.weight.shape
    _check_parts(accumulation_steps, batch=batch, ways=batch // rows.shard_shape((batch,))[0])

    def part(params: Any, examples: Examples, shared: Any) -> tuple[Any, Array]:
        """A part's share of the gradient of the batch's mean loss, and the losses of its samples."""
        key, number, count = shared

        def share(params: Any) -> tuple[Array, Array]:
            losses = objective.losses(params, examples, key, number)
            return weighted_sum(losses, examples.weight)[0] / count, losses

        (_, losses), gradients = jax.value_and_grad(share, has_aux=True)(params)
        return gradients, losses

    def step(state: TrainState, examples: Examples) -> tuple[TrainState, StepResult]:
        # Divided by the number of samples of the whole batch: parts add up, and half precision meets the same sizes.
        count = jnp.maximum(jnp.sum(examples.weight), 1.0)
        shared = (state.key, state.step, count)
        master = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.params)
        if accumulation_steps == 1:
            gradients, losses = part(master, examples, shared)
        else:
            gradients, losses = accumulate(
                part,
                master,
                examples,
                shared,
                parts=accumulation_steps,
                layout=objective.text_to_image.layout,
                batch_shardings=batch_shardings,
                param_shardings=state_shardings.params,
            )
        loss = weighted_sum(losses, examples.weight)[0] / count
        times = objective.times(state.key, examples.index, step=state.step)
        sums, counts = losses_by_time(losses, times, examples.weight)
        updates, opt_state = optimizer.update(gradients, state.opt_state, master)
        params = optax.apply_updates(master, updates)
        params = stored(params, state.params, rounding or "stochastic", key=state.key, step=state.step)
        average = None if state.ema is None else ema.update(state.ema, params, ema.decay_at(state.step, ema_decay))
        norm = optax.tree.norm(gradients)
        # The norm is finite only where every gradient is.
        fine = (state.step >= 0) & jnp.isfinite(loss) & jnp.isfinite(norm)
        params, opt_state, average = jax.tree.map(
            lambda new, old: jnp.where(fine, new, old),
            (params, opt_state, average),
            (state.params, state.opt_state, state.ema),
        )
        number = jnp.where(fine, state.step + 1, jnp.where(state.step < 0, state.step, ~state.step))
        new = state.replace(step=number, params=params, opt_state=opt_state, ema=average)  # type: ignore[attr-defined]
        return new, StepResult(loss=loss, grad_norm=norm, losses=losses, bin_sums=sums, bin_counts=counts)

    said = StepResult(loss=whole, grad_norm=whole, losses=rows, bin_sums=whole, bin_counts=whole)
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_shardings),
        out_shardings=(state_shardings, said),
        donate_argnums=0,
    )


def failed_before(state: TrainState) -> TrainState | None:
    """The state before a step that was not finite, from what it or a later one returned; None if all were fine."""
    step = int(state.step)
    if step >= 0:
        return None
    number = jax.jit(lambda step: ~step, out_shardings=state.step.sharding)(state.step)  # type: ignore[attr-defined]
    return state.replace(step=number)  # type: ignore[attr-defined]


def _check_parts(parts: int, *, batch: int, ways: int) -> None:
    """Refuses a number of parts that the devices cannot all cut their rows into.

    Raises:
        UsageError: with the nearest numbers that work.
    """
    unit = parts * ways
    if batch % unit == 0:
        return
    legal = [count for count in range(1, batch // ways + 1) if batch % (count * ways) == 0]
    near = [*[count for count in legal if count < parts][-1:], *[count for count in legal if count > parts][:1]]
    batches = [size for size in (batch // unit * unit, -(-batch // unit) * unit) if size]
    raise UsageError(
        f"train.accumulation_steps={parts} does not cut train.batch_size={batch} into equal parts for the {ways} "
        f"devices that share a batch: take accumulation_steps={' or '.join(map(str, near))}, or "
        f"batch_size={' or '.join(map(str, batches))}"
    )
