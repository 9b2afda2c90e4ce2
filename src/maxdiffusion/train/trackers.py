"""What a run measures, told to TensorBoard and Weights & Biases as well; each is imported only when it is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import UInt8

from maxdiffusion.config.schema import Recipe, TrackSection, flatten
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import is_remote, write_whole

TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files in that of a run."""

WANDB_RUN = "wandb-run.txt"
"""File with the name by which Weights & Biases knows a run, so that a resumed one goes on there."""

FAILED = 1
"""Exit status that trackers are told where a run ends with an error."""

Values = Mapping[str, float | int | str | list[float]]


class Tracker(Protocol):
    """Somebody who is told what is measured; only the first process has one."""

    def write(self, step: int, values: Values) -> None:
        """Numbers after a step; those that are not finite are left out."""
        ...

    def picture(self, name: str, step: int, pixels: UInt8[np.ndarray, "height width 3"], caption: str) -> None:
        """A picture of a step."""
        ...

    def close(self, status: int) -> None:
        """Brings everything where it belongs, and says how the run ended: 0 is well."""
        ...


class Audience:
    """The trackers of a run; a context manager that closes each of them, whatever another one raises.

    Attributes:
        trackers: told what is measured.
        status: exit status that they are told where nothing was raised; else it is 1.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = tuple(trackers)
        self.status = 0

    def __enter__(self) -> Audience:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as ends:
            for tracker in self.trackers:
                ends.callback(tracker.close, self.status if kind is None else FAILED)


def check_trackers(section: TrackSection, folder: Path) -> None:
    """Refuses what cannot work, before anything is written or compiled.

    Args:
        section: of the recipe.
        folder: of the run.

    Raises:
        UsageError: a package is missing, or the run lives where its files cannot grow.
    """
    if jax.process_index():
        return
    if section.tensorboard:
        if importlib.util.find_spec("tensorboardX") is None:
            raise UsageError(
                "track.tensorboard=true needs the package tensorboardX: pip install 'maxdiffusion[track]', or leave it "
                "out"
            )
        if is_remote(folder):
            raise UsageError(
                f"track.tensorboard=true writes files that grow, and '{folder}' is an object store: leave it out, or "
                "give a local folder with run=FOLDER"
            )
    if section.wandb is not None:
        if importlib.util.find_spec("wandb") is None:
            raise UsageError(f"track.wandb={section.wandb} needs the package wandb: pip install wandb, or leave it out")
        if is_remote(folder) and section.wandb_mode == "offline":
            raise UsageError(
                f"track.wandb_mode=offline keeps its files in the run's folder, and '{folder}' is an object store: "
                "give a local folder with run=FOLDER"
            )


def open_trackers(recipe: Recipe, folder: Path, *, resume_step: int) -> tuple[Tracker, ...]:
    """The trackers that a recipe asks for; none in all processes but the first.

    Args:
        recipe: of the run.
        folder: of the run; it exists.
        resume_step: what was said about later steps is void.

    Raises:
        UsageError: one cannot be reached.
    """
    if jax.process_index():
        return ()
    found: list[Tracker] = []
    if recipe.track.tensorboard:
        found.append(TensorBoard(folder / TENSORBOARD, resume_step=resume_step))
    if recipe.track.wandb is not None:
        found.append(WeightsAndBiases(recipe, folder, resume=resume_step > 0))
    return tuple(found)


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Opens a new file beside those of the run's earlier parts.

        Args:
            folder: of the files.
            resume_step: TensorBoard hides what earlier parts wrote about later steps; all, where it is 0.
        """
        # Without a name of its own, a part that begins in the same second as another would write over it.
        self._writer: Any = import_module("tensorboardX").SummaryWriter(
            str(folder), purge_step=resume_step + 1, filename_suffix=f".{resume_step}"
        )

    def write(self, step: int, values: Values) -> None:
        """One scalar a number; losses by time have a tag for each tenth."""
        for name, value in scalars(values).items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, step: int, pixels: UInt8[np.ndarray, "height width 3"], caption: str) -> None:
        """An image; TensorBoard has no captions, its tag says which prompt it is."""
        del caption
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self, status: int) -> None:
        """Writes what is pending; there is no place for the status."""
        del status
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, or its files on disk with `track.wandb_mode=offline`."""

    def __init__(self, recipe: Recipe, folder: Path, *, resume: bool) -> None:
        """Opens the run there.

        Args:
            recipe: whose values are shown beside the run.
            folder: of the run; its name is the run's name there.
            resume: go on with the run of that folder.

        Raises:
            UsageError: it cannot be reached, or does not know the user.
        """
        self._module: Any = import_module("wandb")
        named = folder / WANDB_RUN
        known = named.read_text(encoding="utf-8").strip() if resume and named.exists() else secrets.token_hex(4)
        place = None if is_remote(folder) else str(folder)
        try:
            self._run: Any = self._module.init(
                project=recipe.track.wandb,
                name=folder.name,
                id=known,
                resume="allow",
                dir=place,
                mode=recipe.track.wandb_mode,
                config=flatten(recipe),
            )
        except (self._module.Error, OSError) as error:
            cause = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"track.wandb={recipe.track.wandb}: Weights & Biases says: {cause}; log in with `wandb login`, keep "
                "the files here with track.wandb_mode=offline, or leave it out"
            ) from error
        write_whole(named, f"{known}\n")
        # A resumed run tells some steps again, which W&B's own counter of steps would drop.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        """All numbers of a step at once."""
        self._run.log({"step": step, **scalars(values)})

    def picture(self, name: str, step: int, pixels: UInt8[np.ndarray, "height width 3"], caption: str) -> None:
        """An image with its prompt."""
        self._run.log({"step": step, name: self._module.Image(pixels, caption=caption)})

    def close(self, status: int) -> None:
        """Waits until all is sent; any status but 0 shows the run as failed."""
        self._run.finish(exit_code=status)


def scalars(values: Values) -> dict[str, float]:
    """The finite numbers of a line of metrics; of losses by time one each, named by its tenth."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            if name.endswith("_by_time") and not name.startswith("count"):
                parts = len(value)
                found |= {f"{name}/{k / parts:.1f}-{(k + 1) / parts:.1f}": one for k, one in enumerate(value)}
        elif isinstance(value, int | float):
            found[name] = value
    return {name: value for name, value in found.items() if math.isfinite(value)}
