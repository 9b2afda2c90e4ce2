"""A training that begins with trained weights: those of a run, of one of its steps, or of a packed model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.models.pictures import Pictures
from maxdiffusion.pipelines.checkpoint_folder import (
    checkpoint_folder,
    chosen_step,
    read_manifest,
    recipe_at,
    split_place,
)
from maxdiffusion.pipelines.packed import MADE, is_packed, stored_mode
from maxdiffusion.pipelines.text_to_image import text_to_image_of
from maxdiffusion.pipelines.trained import read_tokenizer, read_trained

STARTED_FROM = "started_from"
"""What a checkpoint's manifest calls it."""

ANY_SIZE = ("image_size",)
"""Keywords of a model that its weights do not depend on."""

MEANING = ("process", "prediction", "zero_terminal_snr")
"""Values of `diffusion` that decide what a network's output means."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the first weights come from.

    Attributes:
        place: as the recipe says it.
        folder: of the run or the packed model.
        step: of the weights.
        mark: what tells these weights from others: the hash of a packed model's, the time of writing of a checkpoint's.
        recipe: that they were trained with.
        tokenizer: of the words that they know.
    """

    place: str
    folder: Path
    step: int
    mark: str
    recipe: Recipe
    tokenizer: WordTokenizer

    @property
    def told(self) -> dict[str, Any]:
        """What a checkpoint says about it."""
        return {"place": self.place, "folder": str(self.folder), "step": self.step, "mark": self.mark}

    def check(self, recipe: Recipe, model: Pictures) -> None:
        """Refuses weights of another network, before anything is read or compiled.

        Args:
            recipe: of the training.
            model: that it trains.

        Raises:
            UsageError: the first value that differs, with both.

        Warns:
            MaxDiffusionWarning: what the network's output means is another thing.
        """
        words, theirs = self.tokenizer, self.recipe
        if theirs.model != recipe.model:
            raise self._refused("model", theirs.model, recipe.model)
        there = text_to_image_of(theirs, mesh=None, vocab_size=words.vocab_size, max_length=words.max_length).model
        for name in Pictures.__annotations__:
            if name in ANY_SIZE or not hasattr(model, name):
                continue
            old, new = getattr(there, name), getattr(model, name)
            if old != new:
                raise self._refused(f"model_config.{name}", _plain(old), _plain(new))
        for name in MEANING:
            old, new = getattr(theirs.diffusion, name), getattr(recipe.diffusion, name)
            if old != new:
                text = (
                    f"train.start_from={self.place}: its weights were trained with diffusion.{name}={old}, and go on "
                    f"with {new}: they have to learn anew what they predict"
                )
                warnings.warn(MaxDiffusionWarning(text), stacklevel=2)

    def weights(self, model: Pictures) -> Any:
        """The weights that pictures would be made with, float32, laid out as the model says.

        Raises:
            UsageError: they cannot be read, or an array of them is of another model.
        """
        return read_trained(self.folder, model, self.recipe, step=self.step)[0]

    def _refused(self, key: str, old: Any, new: Any) -> UsageError:
        return UsageError(
            f"train.start_from={self.place} has weights of another model, with {key}={old}, and this recipe says "
            f"{new}: write {key}={old}, or start without them"
        )


def open_start(place: str) -> Start:
    """Finds the weights to begin with; reads everything but them.

    Args:
        place: `RUN`, `RUN@STEP`, the folder of a packed model, or the name of a packaged one.

    Raises:
        UsageError: there are none.
    """
    try:
        folder, step = split_place(place)
        recipe = recipe_at(folder, step)
        if is_packed(folder):
            if stored_mode(folder):
                raise UsageError(
                    f"its weights are stored in {stored_mode(folder)}: start from the run they were made of"
                )
            made = json.loads((folder / MADE).read_text(encoding="utf-8"))
            step, mark = int(made["step"]), str(made["sha256"])
        else:
            step = chosen_step(folder, step)
            mark = str((read_manifest(checkpoint_folder(folder, step)) or {}).get("written", "unknown"))
        return Start(
            place=place, folder=folder, step=step, mark=mark, recipe=recipe, tokenizer=read_tokenizer(folder, step)
        )
    except UsageError as error:
        raise UsageError(f"train.start_from={place}: {error}") from error


def started_from(run: Path, step: int) -> Mapping[str, Any] | None:
    """What a run was started from, by its checkpoint; None where its weights were drawn."""
    return (read_manifest(checkpoint_folder(run, step)) or {}).get(STARTED_FROM)


def _plain(value: Any) -> Any:
    """A value as a recipe writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(str(_plain(one)) for one in value)}]"
    return str(value).lower() if isinstance(value, bool) else value
