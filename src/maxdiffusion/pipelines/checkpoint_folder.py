"""What the folder of a checkpoint holds and whether it is whole: read without jax, on any machine.

checkpoints/STEP/
    params/ opt_state/ ema/ key/    one folder for each part of the training state, written by Orbax
    recipe.yaml                     the recipe that the step was trained with
    tokenizer.json                  the words of the captions
    checkpoint.json                 what all this is, and the size of every file; written last

A checkpoint is written under another name and renamed when it is whole (in an object store it is whole when
`commit_success.txt` is there), so a process may die at any moment.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxdiffusion.config.load import RUN_RECIPE, load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.errors import MaxDiffusionWarning, UsageError, nearest
from maxdiffusion.paths import as_path, is_remote
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS
from maxdiffusion.pipelines.shipped import DEFAULT_MODEL, shipped_model, shipped_names

CHECKPOINTS = "checkpoints"
MANIFEST = "checkpoint.json"
FORMAT = 1
"""Of the manifest; a reader knows its own and older ones."""

COMMITTED = "commit_success.txt"
"""Orbax's mark in an object store that a folder is whole."""

ORBAX_FILES = ("_METADATA", "manifest.ocdbt")
"""What each part has at least."""


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return as_path(run) / CHECKPOINTS / str(step)


def checkpoint_steps(run: str | Path) -> list[int]:
    """The steps that have a checkpoint, in order; one that was being written when a run died does not count."""
    folder = as_path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if entry.name.isdigit() and entry.is_dir()]
    if is_remote(folder):
        found = [entry for entry in found if (entry / COMMITTED).exists()]
    return sorted(int(entry.name) for entry in found)


def split_place(place: str | Path) -> tuple[Path, int | None]:
    """The run and the step that `RUN` or `RUN@STEP` names; None for the step stands for the newest.

    The name of a packaged model stands for its folder, which is read as a run is.

    Raises:
        UsageError: the run has no checkpoint of that step; the nearest ones are named. Or there is no such run, and its
            name is nearly that of a packaged model.
    """
    own = shipped_model(place)
    if own is not None:
        return own, None
    whole = as_path(place)
    run, mark, text = str(place).rpartition("@")
    if not whole.exists() and mark and shipped_model(run):
        raise UsageError(f"the packaged model '{run}' has one set of weights and no steps: leave '@{text}' out")
    hint = "" if whole.exists() or "/" in str(place) else nearest(str(place), shipped_names())
    if hint.startswith("did you mean"):
        raise UsageError(f"there is no run '{place}', nor a packaged model of that name: {hint}")
    if not mark or whole.is_dir() or not as_path(run).is_dir():
        return whole, None
    steps = checkpoint_steps(run)
    if text.isdigit() and int(text) in steps:
        return as_path(run), int(text)
    if (as_path(run) / PACKED_WEIGHTS).is_file():
        raise UsageError(f"the packed model '{run}' has one set of weights and no steps: leave '@{text}' out")
    if not steps:
        raise UsageError(f"run '{run}' has no checkpoint of step {text}: it has none")
    if not text.isdigit():
        raise UsageError(f"'{text}' in '{place}' is no step: write a number, such as {steps[-1]}")
    near = sorted(sorted(steps, key=lambda step: abs(step - int(text)))[:2])
    all_of_them = f" (of {len(steps)}: maxdiffusion ckpt ls {run})" if len(steps) > len(near) else ""
    raise UsageError(
        f"run '{run}' has no checkpoint of step {text}: it has those of {' and '.join(map(str, near))}{all_of_them}"
    )


def recipe_folder(run: Path, step: int | None) -> Path:
    """Where the recipe of a step is: with its checkpoint; of the newest, and of an older version's, with the run.

    Args:
        run, step: from `split_place`.
    """
    own = run if step is None else checkpoint_folder(run, step)
    return own if (own / RUN_RECIPE).is_file() else run


def recipe_at(run: Path, step: int | None, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a step.

    Args:
        run, step: from `split_place`.
        changes: `key=value` words.

    Raises:
        UsageError: there is no such run (what needs none is named), or a change cannot work.
    """
    otherwise = f"without one there is the packaged model, '{DEFAULT_MODEL}'"
    return load_run(recipe_folder(run, step), changes, otherwise=otherwise).recipe


def unfinished_steps(run: str | Path) -> list[int]:
    """The steps whose checkpoints were begun and not finished: a process writes them now, or died while it did."""
    folder = as_path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    names = {entry.name.partition(".orbax-checkpoint-tmp")[0] for entry in folder.iterdir() if entry.is_dir()}
    begun = {int(name) for name in names if name.isdigit()}
    return sorted(begun - set(checkpoint_steps(run)))


def parts_in(folder: Path) -> set[str]:
    """Names of the parts that a checkpoint's folder holds, such as params and ema."""
    return {entry.name for entry in folder.iterdir() if entry.is_dir()}


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of itself; None for one of an older version, which says nothing.

    Raises:
        UsageError: the file is cut off, or of a newer version.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}): take another checkpoint") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise UsageError(f"{path} does not say what the checkpoint is: take another checkpoint")
    if content["format"] > FORMAT:
        raise UsageError(
            f"{path} has format {content['format']}, and this version reads {FORMAT}: install a newer maxdiffusion"
        )
    return content


def flaw_of(folder: Path) -> str | None:
    """Why a checkpoint's folder is not whole, in a few words; None if it is.

    Every file must have the size that it was written with; contents are checked by Orbax when they are read.
    """
    try:
        manifest = read_manifest(folder)
    except UsageError as error:
        return str(error).removeprefix(f"{folder}/").partition(":")[0]
    if manifest is None:
        parts = parts_in(folder)
        names = [f"{part}/{name}" for part in sorted(parts | {"params"}) for name in ORBAX_FILES]
        missing = next((name for name in names if not (folder / name).exists()), None)
        return None if missing is None else f"{missing} is missing"
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        length = file_size(path)
        if length != size:
            return f"{name} has {length} bytes of {size}"
    return None


def flaw(run: str | Path, step: int) -> str | None:
    """Why a checkpoint is not whole, in a few words; None if it is."""
    return flaw_of(checkpoint_folder(run, step))


def newest_whole(run: str | Path) -> int | None:
    """The newest step whose checkpoint is whole; None where there are no checkpoints.

    Raises:
        UsageError: there are some, and none is whole.

    Warns:
        MaxDiffusionWarning: for each newer one that is not whole: which, and why.
    """
    broken = broken_steps(run)
    whole = [step for step in checkpoint_steps(run) if step not in broken]
    lines = [f"checkpoint {checkpoint_folder(run, step)} is not whole: {why}" for step, why in broken.items()]
    if lines and not whole:
        raise UsageError(f"{'; '.join(lines)}: none is left to use, bring back the files or start another run")
    for line in lines:
        warnings.warn(MaxDiffusionWarning(f"{line}: step {whole[-1]} is used instead"), stacklevel=2)
    return whole[-1] if whole else None


def broken_steps(run: str | Path) -> dict[int, str]:
    """The checkpoints that are newer than the newest whole one, the newest first, each with what is wrong with it."""
    broken = {}
    for step in reversed(checkpoint_steps(run)):
        why = flaw(run, step)
        if why is None:
            break
        broken[step] = why
    return broken


def chosen_step(run: str | Path, step: int | None = None) -> int:
    """The step whose checkpoint is read: that which is asked for, else the newest whole one.

    Raises:
        UsageError: there is none, or the one asked for is not whole.

    Warns:
        MaxDiffusionWarning: a newer one is not whole.
    """
    if step is not None:
        why = flaw(run, step)
        if why is not None:
            raise UsageError(f"checkpoint {checkpoint_folder(run, step)} is not whole: {why}: take another step")
        return step
    step = newest_whole(run)
    if step is None:
        raise UsageError(f"run '{run}' has no checkpoint yet: train it until its first one (train.checkpoint_every)")
    return step


def sizes_in(folder: Path) -> dict[str, int]:
    """Size of every file of a folder and of the folders in it, by its path in there."""
    found: dict[str, int] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= {f"{entry.name}/{name}": size for name, size in sizes_in(entry).items()}
        else:
            found[entry.name] = file_size(entry)
    return found


def file_size(path: Path) -> int:
    """Bytes of a file."""
    status: Any = path.stat()
    return int(status.length if is_remote(path) else status.st_size)
