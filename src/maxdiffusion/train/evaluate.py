"""What a run has learnt, in figures about (concept, style) pairs that it never saw."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8
from PIL import Image

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.batches import batches
from maxdiffusion.data.pictures import Pictures
from maxdiffusion.data.png import picture_grid, write_png
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.timesteps import Uniform
from maxdiffusion.errors import UsageError
from maxdiffusion.parallel.multihost import everywhere
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.run_files import EVALUATION, SAMPLES
from maxdiffusion.pipelines.text_to_image import sampler
from maxdiffusion.pipelines.trained import open_trained
from maxdiffusion.train.feed import built_in, held_out_source, make_feed
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.step import Examples, Objective, objective_of

THUMBNAIL = 16
"""Side of the thumbnails that are compared, in pixels."""

SHOWN = 16
"""Pairs that the picture of an evaluation shows."""

Z95 = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Denoising losses on held-out pairs, over the same noise and times.

    Attributes:
        captioned: mean loss with the caption.
        uncaptioned: mean loss with the empty text.
        gain: mean over the pairs of (uncaptioned - captioned).
        gain_interval: its 95 % interval; the pairs are the sample.
    """

    captioned: float
    uncaptioned: float
    gain: float
    gain_interval: tuple[float, float]

    def as_metrics(self) -> dict[str, float]:
        """Names and values for a line of metrics."""
        return {"held_out_loss": self.captioned, "unconditional_loss": self.uncaptioned}


class HeldOutLoss:
    """Measures weights on held-out pairs; compiled at the first call, then only run."""

    def __init__(
        self, objective: Objective, tokenizer: WordTokenizer, source: Pictures, *, seed: int, num_draws: int = 8
    ) -> None:
        """Prepares the pairs.

        Args:
            objective: of the training; its share of dropped captions is not used.
            tokenizer: of the captions.
            source: held-out pairs.
            seed: of noise and times.
            num_draws: noises and times for each pair.
        """
        layout = objective.text_to_image.layout
        size = -(-len(source) // layout.batch_divisor) * layout.batch_divisor
        feed = make_feed(layout, tokenizer, batch_size=size)
        shard, num_shards = feed.share
        batch = batches(
            source, batch_size=size, seed=0, order="source", epochs="one", shard_index=shard, num_shards=num_shards
        )[0]
        self._pairs, self._draws = len(source), num_draws
        self._examples = feed(batch)
        empty = dataclasses.replace(batch, captions=("",) * len(batch))
        self._uncaptioned = feed(empty)
        self._key = everywhere(jax.random.key(seed), layout.replicated)
        # Evenly spread times: the mean over few draws is then close to the mean over all times.
        measured = dataclasses.replace(objective, times=Uniform(draw="stratified"), caption_dropout=0.0)

        def losses(params: Any, examples: Examples, key: Array) -> Float[Array, "draws batch"]:
            def one(number: Int[Array, ""]) -> Float[Array, " batch"]:
                return measured.losses(params, examples, key, number)

            return jax.lax.map(one, jnp.arange(num_draws))

        self._losses = jax.jit(losses, out_shardings=layout.replicated)

    def __call__(self, params: Any) -> HeldOut:
        """The losses of these weights, laid out on the mesh."""
        captioned, uncaptioned = (
            np.asarray(self._losses(params, examples, self._key), np.float64)[:, : self._pairs].mean(axis=0)
            for examples in (self._examples, self._uncaptioned)
        )
        gains = uncaptioned - captioned
        spread = Z95 * gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        gain = float(gains.mean())
        return HeldOut(
            captioned=float(captioned.mean()),
            uncaptioned=float(uncaptioned.mean()),
            gain=gain,
            gain_interval=(gain - spread, gain + spread),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """Figures about a run.

    Attributes:
        run: its folder.
        step: of the weights.
        held_out_pairs: (concept, style) pairs that the training never saw.
        held_out_loss: denoising loss on them with their captions.
        unconditional_loss: the same noise and times with the empty text.
        loss_gain_interval: 95 % interval of the difference.
        retrieval: share of the pictures generated for held-out pairs whose nearest target is their own.
        retrieval_interval: 95 % interval; pictures of one pair do not count as independent.
        chance: the share that pictures without any meaning would reach.
        times_chance: `retrieval / chance`.
        other_styles: the share that the training pictures of the same concept, in its other styles, reach as they are.
        seeds: pictures generated for each pair.
        learned: whether both differences from chance are outside their intervals.
        seconds: that the evaluation took, compilation included.
        pictures: a picture of targets (first row) and what was generated for them.
        samples: newest grid of samples of the training; None where there is none.
    """

    run: Path
    step: int
    held_out_pairs: int
    held_out_loss: float
    unconditional_loss: float
    loss_gain_interval: tuple[float, float]
    retrieval: float
    retrieval_interval: tuple[float, float]
    chance: float
    times_chance: float
    other_styles: float
    seeds: int
    learned: bool
    seconds: float
    pictures: Path
    samples: Path | None


def evaluate_run(run: str | Path, *, recipe: Recipe | None = None, num_seeds: int = 8) -> EvaluateResult:
    """Measures a run's newest weights; writes `evaluation.json` and a picture into its folder.

    Args:
        run: folder of the run.
        recipe: of the run, with another mesh or other sampling; None takes the run's own.
        num_seeds: pictures generated for each held-out pair.

    Raises:
        UsageError: there is no such run, or it holds no pairs out.
    """
    began = time.perf_counter()
    folder, reporter = as_path(run), Reporter()
    recipe = load_run(folder).recipe if recipe is None else recipe
    source = held_out_source(recipe.data)
    if source is None:
        raise UsageError(
            f"run '{run}' holds no (concept, style) pairs out, so there is nothing to measure it on: only the built-in "
            "pictures have such pairs (data.source=pictures, data.split=train)"
        )
    trained = open_trained(folder, recipe)
    objective = objective_of(recipe, trained.text_to_image, trained.tokenizer)
    with reporter.phase(f"losses on {len(source)} held-out pairs"):
        losses = HeldOutLoss(objective, trained.tokenizer, source, seed=recipe.seed)(trained.params)
    with reporter.phase(f"{num_seeds} pictures for each of {len(source)} held-out pairs"):
        # Every picture has its own noise: the interval takes pairs to be independent.
        made = sampler(trained.text_to_image, recipe.sample).pictures(
            trained.params,
            trained.tokenizer,
            source.captions,
            num_images=num_seeds,
            seed=recipe.sample.seed,
            indices=np.arange(len(source) * num_seeds),
        )
    right = nearest_is_own(made, source.images)
    interval = clustered_interval(right)
    share, chance = float(right.mean()), 1 / len(source)
    result = EvaluateResult(
        run=folder,
        step=trained.step,
        held_out_pairs=len(source),
        held_out_loss=losses.captioned,
        unconditional_loss=losses.uncaptioned,
        loss_gain_interval=losses.gain_interval,
        retrieval=share,
        retrieval_interval=interval,
        chance=chance,
        times_chance=share / chance,
        other_styles=other_styles(source, built_in(recipe.data, "train")),
        seeds=num_seeds,
        learned=losses.gain_interval[0] > 0 and interval[0] > chance,
        seconds=time.perf_counter() - began,
        pictures=folder / f"{EVALUATION}.png",
        samples=max((folder / SAMPLES).glob("*.png"), key=lambda path: path.stat().st_mtime_ns, default=None),
    )
    return _written(result, made, source) if jax.process_index() == 0 else result


def thumbnails(pixels: UInt8[np.ndarray, "n height width 3"]) -> Float[np.ndarray, "n numbers"]:
    """Each picture as 16 x 16 RGB means, one row a picture."""
    small = [
        np.asarray(Image.fromarray(picture).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)) for picture in pixels
    ]
    return np.stack(small).reshape(len(small), -1).astype(np.float64)


def other_styles(source: Pictures, training: Pictures) -> float:
    """Share of the training pictures of held-out concepts whose nearest target is that concept's held-out picture.

    What a copier of the concept in a style that it knows would reach; `nan` where there is no such picture.
    """
    wanted, known = thumbnails(source.images), thumbnails(training.images)
    right = [
        int(np.square(wanted - known[row]).sum(axis=1).argmin()) == pair
        for pair, concept in enumerate(source.concepts)
        for row, other in enumerate(training.concepts)
        if other == concept
    ]
    return float(np.mean(right)) if right else math.nan


def nearest_is_own(
    made: UInt8[np.ndarray, "pairs seeds height width 3"], targets: UInt8[np.ndarray, "pairs height width 3"]
) -> Bool[np.ndarray, "pairs seeds"]:
    """Whether the target nearest to each picture, by Euclidean distance of thumbnails, is that of its own pair.

    A picture that is as near to another target counts as wrong.
    """
    pairs, seeds = made.shape[:2]
    wanted = thumbnails(targets)
    ours = thumbnails(made.reshape(pairs * seeds, *made.shape[2:]))
    distances = np.square(ours[:, None] - wanted[None]).sum(axis=2).reshape(pairs, seeds, pairs)
    own = np.take_along_axis(distances, np.arange(pairs)[:, None, None], axis=2)
    return (distances <= own).sum(axis=2) == 1


def clustered_interval(right: Bool[np.ndarray, "pairs seeds"]) -> tuple[float, float]:
    """The 95 % Wilson interval of the share of True, for pictures that come in clusters.

    Wilson (1927) at the effective sample size of cluster sampling (Kish 1965): the number of pictures over the design
    effect, which is the variance of the mean as the spread between the pairs shows it, over that of independent
    pictures. It is kept between the number of pairs and the number of pictures.
    """
    pairs, number = right.shape[0], right.size
    share = float(right.mean())
    between = float(right.mean(axis=1).var(ddof=1)) / pairs if pairs > 1 else 0.0
    effective = share * (1 - share) / between if between > 0 else float(pairs)
    return wilson_interval(share, min(max(effective, float(pairs)), float(number)))


def wilson_interval(share: float, number: float) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in `number` independent trials."""
    scale = 1 + Z95**2 / number
    middle = (share + Z95**2 / (2 * number)) / scale
    spread = Z95 * math.sqrt(share * (1 - share) / number + Z95**2 / (4 * number**2)) / scale
    return max(0.0, middle - spread), min(1.0, middle + spread)


def _written(result: EvaluateResult, made: np.ndarray, source: Pictures) -> EvaluateResult:
    """Writes the result and its picture; an evaluation replaces the one before."""
    result.pictures.unlink(missing_ok=True)
    shown = np.linspace(0, len(source) - 1, min(SHOWN, len(source))).astype(int)
    rows = [source.images[shown], *np.moveaxis(made[shown][:, :4], 1, 0)]
    text = {"captions": "\n".join(source.captions[index] for index in shown), "step": result.step}
    write_png(result.pictures, picture_grid(np.stack(rows)), text)
    # JSON has no infinities: the interval of a single pair becomes null.
    plain = json.loads(json.dumps(dataclasses.asdict(result), default=str), parse_constant=lambda _: None)
    (result.run / f"{EVALUATION}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return result
