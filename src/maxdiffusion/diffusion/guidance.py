"""Classifier-free guidance maps a denoiser to a denoiser (Ho & Salimans 2022).

guided = negative + scale (positive - negative), on whatever the model predicts: every prediction type is linear in it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from maxdiffusion.diffusion.broadcast import over_batch
from maxdiffusion.diffusion.denoiser import CacheState, Cond, Denoiser
from maxdiffusion.errors import UsageError, nearest

Mode = Literal["batched", "sequential"]


class CondPair(NamedTuple):
    """The condition of a guided denoiser: what is wanted, and what to go away from (usually the empty prompt)."""

    positive: Cond
    negative: Cond


def classifier_free(
    denoiser: Denoiser,
    *,
    scale: float | Float[Array, "..."],
    mode: Mode = "batched",
    rescale: float = 0.0,
) -> Denoiser:
    """The guided denoiser; its condition is a `CondPair`.

    Args:
        denoiser: the model.
        scale: guidance scale. The Python number 1 means the positive condition alone: the model is called on one half,
            and the condition may have `negative=None`. An array, scalar or (batch,), is computed in full.
        mode: `batched`, one call on 2 x batch, the two halves of each sample next to each other, so that a batch
            sharded over devices stays where it is; `sequential`, two calls, for less memory or negative conditions of
            another shape. The numbers are the same.
        rescale: phi of Lin et al. 2023, equations 15 and 16: 0 is none, 0.7 is theirs.

    Returns:
        A denoiser. The cache of the model has 2 x batch rows in `batched` mode, is a pair (positive's, negative's) in
        `sequential` mode, or is `()`.

    Raises:
        UsageError: an unknown mode, a scale that is not finite, or rescale outside 0 .. 1; when called, a condition
            that is not a `CondPair` or has no negative half, a scale of another shape, or, in `batched` mode, halves of
            different shapes or with arrays that are not of the samples.
    """
    if mode not in get_args(Mode):
        raise UsageError(f"guidance mode {mode!r}: {nearest(str(mode), get_args(Mode))}")
    if isinstance(scale, int | float) and not math.isfinite(scale):
        raise UsageError(f"guidance scale {scale}: write a finite number (1 is no guidance)")
    if not 0 <= rescale <= 1:
        raise UsageError(f"guidance rescale {rescale}: write a number from 0 (none) to 1")
    call = _batched if mode == "batched" else _sequential

    def guided(
        cache: CacheState, x: Float[Array, "batch ..."], timestep: Float[Array, " batch"], cond: Cond
    ) -> tuple[CacheState, Float[Array, "batch ..."]]:
        if not isinstance(cond, CondPair):
            raise UsageError(f"guidance needs CondPair(positive, negative), not {type(cond).__name__}")
        if isinstance(scale, int | float) and scale == 1:
            return denoiser(cache, x, timestep, cond.positive)
        if cond.negative is None:
            raise UsageError(
                f"guidance scale {scale} needs a negative condition: give that of the empty text, or scale 1"
            )
        if jnp.shape(scale) not in ((), x.shape[:1]):
            raise UsageError(
                f"guidance scale has shape {jnp.shape(scale)}: give one number, or one for each of {x.shape[0]} samples"
            )
        cache, positive, negative = call(denoiser, cache, x, timestep, cond)
        positive, negative = positive.astype(jnp.float32), negative.astype(jnp.float32)
        mixed = negative + over_batch(jnp.asarray(scale, jnp.float32), x) * (positive - negative)
        return cache, (_rescaled(mixed, positive, rescale) if rescale else mixed).astype(x.dtype)

    return guided


def _batched(
    denoiser: Denoiser, cache: CacheState, x: Array, timestep: Array, cond: CondPair
) -> tuple[CacheState, Array, Array]:
    batch = x.shape[0]
    timestep, cond = jax.tree.map(lambda leaf: leaf if jnp.ndim(leaf) else jnp.full(batch, leaf), (timestep, cond))
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), half) for half in cond]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"positive and negative conditions differ, {shapes[0]} and {shapes[1]}: "
            "pad them to one shape, or use mode='sequential'"
        )
    shared = [leaf.shape for leaf in jax.tree.leaves(cond) if leaf.shape[0] != batch]
    if shared:
        raise UsageError(
            f"a condition has an array of shape {shared[0]}, which is not one entry for each of {batch} samples: "
            "repeat it for them, or use mode='sequential'"
        )
    both = jax.tree.map(interleave, cond.positive, cond.negative)
    cache, output = denoiser(cache, interleave(x, x), interleave(timestep, timestep), both)
    return cache, *halves(output)


def halves(x: Shaped[Array, "twice ..."]) -> tuple[Shaped[Array, "batch ..."], Shaped[Array, "batch ..."]]:
    """The two batches that `interleave` joined."""
    pairs = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def _sequential(
    denoiser: Denoiser, cache: CacheState, x: Array, timestep: Array, cond: CondPair
) -> tuple[CacheState, Array, Array]:
    first, second = cache or ((), ())
    first, positive = denoiser(first, x, timestep, cond.positive)
    second, negative = denoiser(second, x, timestep, cond.negative)
    return (first, second) if cache else (), positive, negative


def interleave(a: Shaped[Array, "batch ..."], b: Shaped[Array, "batch ..."]) -> Shaped[Array, "twice ..."]:
    """One batch of both, the two halves of each sample next to each other."""
    return jnp.stack([a, b], axis=1).reshape(2 * a.shape[0], *a.shape[1:])


def _rescaled(mixed: Array, positive: Array, rescale: float) -> Array:
    dims = tuple(range(1, mixed.ndim))
    spread = jnp.std(mixed, axis=dims, keepdims=True)
    ratio = jnp.where(spread > 0, jnp.std(positive, axis=dims, keepdims=True) / jnp.where(spread > 0, spread, 1.0), 1.0)
    return mixed * (rescale * ratio + (1 - rescale))
