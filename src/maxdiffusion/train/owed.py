"""What was due at the step that a run goes on from, and was not made: its process was killed after the checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from PIL import Image

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.pipelines.run_files import METRICS, SAMPLES, grid_number, grids_in

MEASURED = "held_out_loss"
"""What every line of metrics of an evaluation has."""


@dataclass(frozen=True, kw_only=True)
class Owed:
    """What is made up for before the first step.

    Attributes:
        evaluation: on held-out pictures.
        samples: a grid of pictures.
    """

    evaluation: bool = False
    samples: bool = False


def owed_at(step: int, section: TrainSection, folder: Path) -> Owed:
    """What is due after a step and is not in the run's folder; every host hears what the first one finds.

    Args:
        step: to go on from; 0 owes nothing.
        section: says what is due when.
        folder: of the run.
    """
    if not step:
        return Owed()

    def due(every: int) -> bool:
        return bool(every) and (step == section.steps or step % every == 0)

    found = np.array(
        [
            due(section.eval_every) and not _was_measured(folder / METRICS, step),
            due(section.sample_every) and not _was_drawn(folder / SAMPLES, step),
        ],
        np.int32,
    )
    if jax.process_count() > 1:
        found = np.asarray(multihost_utils.broadcast_one_to_all(found))
    return Owed(evaluation=bool(found[0]), samples=bool(found[1]))


def _was_measured(metrics: Path, step: int) -> bool:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    for line in lines:
        try:
            values = json.loads(line)
        except json.JSONDecodeError:  # a process that was killed may have left half a line
            continue
        if values.get("step") == step and MEASURED in values:
            return True
    return False


def _was_drawn(samples: Path, step: int) -> bool:
    return any(_is_whole(path) for path in grids_in(samples) if grid_number(path)[0] == step)


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file, Image.open(file) as picture:
            picture.load()
    except (OSError, SyntaxError):  # what Pillow raises for a file that is cut off
        return False
    return True
