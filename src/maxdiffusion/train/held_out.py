"""Validation loss: denoising held-out pairs at eight equidistant times, always with the same noise."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxdiffusion.data.batches import batches
from maxdiffusion.data.pictures import Pictures
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.timesteps import Equidistant
from maxdiffusion.parallel.multihost import everywhere
from maxdiffusion.train.feed import make_feed
from maxdiffusion.train.likeness import Z95
from maxdiffusion.train.step import Examples, Objective

NUM_TIMES = 8
"""Equidistant times 0, 1/8, ... 7/8 from the data to the noise."""

LARGEST_BATCH = 128
"""Pairs that are denoised at once, at most (rounded up to what the mesh divides)."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Denoising losses on held-out pairs, over the same noise and times.

    Attributes:
        captioned: mean loss with the caption.
        uncaptioned: mean loss with the empty text.
        gain: mean over the pairs of (uncaptioned - captioned).
        gain_interval: its 95 % interval; the pairs are the sample.
        by_time: mean loss with the caption at each of the times, data first.
    """

    captioned: float
    uncaptioned: float
    gain: float
    gain_interval: tuple[float, float]
    by_time: tuple[float, ...]

    def as_metrics(self) -> dict[str, float | list[float]]:
        """Names and values for a line of metrics."""
        return {
            "held_out_loss": self.captioned,
            "unconditional_loss": self.uncaptioned,
            "held_out_loss_by_time": list(self.by_time),
        }


class HeldOutLoss:
    """Measures weights on held-out pairs; compiled at the first call, then only run."""

    def __init__(self, objective: Objective, tokenizer: WordTokenizer, source: Pictures, *, seed: int) -> None:
        """Prepares the pairs.

        Args:
            objective: of the training; its share of dropped captions is not used.
            tokenizer: of the captions.
            source: held-out pairs.
            seed: of the noise.
        """
        layout = objective.text_to_image.layout
        unit = layout.batch_divisor
        size = -(-min(len(source), LARGEST_BATCH) // unit) * unit
        feed = make_feed(layout, tokenizer, batch_size=size)
        shard, num_shards = feed.share
        whole = batches(
            source, batch_size=size, seed=0, order="source", epochs="one", shard_index=shard, num_shards=num_shards
        )
        parts = [whole[number] for number in range(-(-len(source) // size))]
        self._pairs = len(source)
        self._captioned = [feed(part) for part in parts]
        self._uncaptioned = [feed(dataclasses.replace(part, captions=("",) * len(part))) for part in parts]
        self._key = everywhere(jax.random.key(seed), layout.replicated)
        measured = dataclasses.replace(objective, times=Equidistant(number=NUM_TIMES), caption_dropout=0.0)

        def losses(params: Any, examples: Examples, key: Array) -> Float[Array, "times batch"]:
            def one(number: Int[Array, ""]) -> Float[Array, " batch"]:
                return measured.losses(params, examples, key, number)

            return jax.lax.map(one, jnp.arange(NUM_TIMES))

        self._losses = jax.jit(losses, out_shardings=layout.replicated)

    def __call__(self, params: Any) -> HeldOut:
        """The losses of these weights, laid out on the mesh."""
        captioned, uncaptioned = (self._of(params, parts) for parts in (self._captioned, self._uncaptioned))
        gains = (uncaptioned - captioned).mean(axis=0)
        spread = Z95 * gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        gain = float(gains.mean())
        return HeldOut(
            captioned=float(captioned.mean()),
            uncaptioned=float(uncaptioned.mean()),
            gain=gain,
            gain_interval=(gain - spread, gain + spread),
            by_time=tuple(captioned.mean(axis=1).tolist()),
        )

    def _of(self, params: Any, parts: list[Examples]) -> Float[np.ndarray, "times pairs"]:
        """Losses of every pair, float64; the last part may be filled up."""
        found = [np.asarray(self._losses(params, part, self._key), np.float64) for part in parts]
        return np.concatenate(found, axis=1)[:, : self._pairs]
