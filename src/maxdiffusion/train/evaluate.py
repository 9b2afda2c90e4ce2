"""What a run has learnt, in figures about (concept, style) pairs that it never saw."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.pictures import Pictures
from maxdiffusion.data.png import picture_grid, write_png
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.run_files import EVALUATION, METRICS, SAMPLES, grids_in
from maxdiffusion.pipelines.trained import open_trained
from maxdiffusion.train.feed import built_in, held_out_source
from maxdiffusion.train.held_out import HeldOutLoss
from maxdiffusion.train.likeness import Likeness
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.report import write_report
from maxdiffusion.train.step import objective_of

SHOWN = 16
"""Pairs that the picture of an evaluation shows."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """Figures about a run.

    Attributes:
        run: its folder.
        step: of the weights.
        held_out_pairs: (concept, style) pairs that the training never saw.
        held_out_loss: denoising loss on them with their captions, over eight equidistant times.
        held_out_loss_by_time: the same at each time, data first.
        unconditional_loss: the same noise and times with the empty text.
        loss_gain_interval: 95 % interval of the difference.
        gallery: held-out pairs whose captions were painted, at most 100.
        seeds: pictures generated for each.
        retrieval: share of them whose nearest target in the gallery is their own, by the shipped classifier's features.
        retrieval_interval: 95 % interval; pictures of one pair do not count as independent.
        chance: the share that pictures without any meaning would reach.
        times_chance: `retrieval / chance`.
        other_styles: the share that the training pictures of the same concept, in its other styles, reach as they are.
        pictures_frechet: their Fréchet distance to the training pictures on features of the shipped classifier; it is
            not the FID, whose features are Inception's.
        pictures_frechet_of_real: that of the gallery's real pictures.
        learned: whether both differences from chance are outside their intervals.
        seconds: that the evaluation took, compilation included.
        pictures: a picture of targets (first row) and what was generated for them.
        samples: newest grid of samples of the training; None where there is none.
    """

    run: Path
    step: int
    held_out_pairs: int
    held_out_loss: float
    held_out_loss_by_time: tuple[float, ...]
    unconditional_loss: float
    loss_gain_interval: tuple[float, float]
    gallery: int
    seeds: int
    retrieval: float
    retrieval_interval: tuple[float, float]
    chance: float
    times_chance: float
    other_styles: float
    pictures_frechet: float
    pictures_frechet_of_real: float
    learned: bool
    seconds: float
    pictures: Path
    samples: Path | None


def evaluate_run(run: str | Path, *, recipe: Recipe | None = None, num_seeds: int = 8) -> EvaluateResult:
    """Measures a run's newest weights; writes `evaluation.json` and a picture into its folder, and its report anew.

    Args:
        run: folder of the run.
        recipe: of the run, with another mesh or other sampling; None takes the run's own.
        num_seeds: pictures generated for each pair of the gallery.

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
    likeness = Likeness(
        trained.text_to_image,
        trained.tokenizer,
        held_out=source,
        training=built_in(recipe.data, "train"),
        section=recipe.sample,
        num_seeds=num_seeds,
    )
    with reporter.phase(f"{num_seeds} pictures for each of {len(likeness.targets)} held-out pairs"):
        made = likeness.paint(trained.params)
    figures = likeness.of(made)
    result = EvaluateResult(
        run=folder,
        step=trained.step,
        held_out_pairs=len(source),
        held_out_loss=losses.captioned,
        held_out_loss_by_time=losses.by_time,
        unconditional_loss=losses.uncaptioned,
        loss_gain_interval=losses.gain_interval,
        gallery=figures.pairs,
        seeds=figures.seeds,
        retrieval=figures.retrieval,
        retrieval_interval=figures.retrieval_interval,
        chance=figures.chance,
        times_chance=figures.retrieval / figures.chance,
        other_styles=figures.other_styles,
        pictures_frechet=figures.frechet,
        pictures_frechet_of_real=figures.frechet_of_real,
        # A numpy bool, which JSON cannot say, where the first one is false.
        learned=bool(losses.gain_interval[0] > 0 and figures.retrieval_interval[0] > figures.chance),
        seconds=time.perf_counter() - began,
        pictures=folder / f"{EVALUATION}.png",
        samples=next(reversed(grids_in(folder / SAMPLES)), None),
    )
    return _written(result, made, likeness.targets) if jax.process_index() == 0 else result


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
    if (result.run / METRICS).is_file():
        write_report(result.run)
    return result
