"""Pictures for prompts from a trained run: PNG files that say how they were made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from maxdiffusion import __version__
from maxdiffusion.config.schema import LARGEST_SEED, Recipe
from maxdiffusion.data.png import slug, write_png
from maxdiffusion.data.prompts import unknown_words
from maxdiffusion.errors import UsageError
from maxdiffusion.nn.quantisation import StoredBytes, stored_bytes
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines import shipped
from maxdiffusion.pipelines.checkpoint_folder import recipe_at, split_place
from maxdiffusion.pipelines.text_to_image import sampler, styles_in
from maxdiffusion.pipelines.trained import open_trained, read_tokenizer

GENERATED = "generated"
"""Folder in a run's folder that pictures go to where none is named."""


PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """What was made.

    Attributes:
        files: a PNG file for each picture, prompt by prompt.
        step: of the weights.
        seed: of the noise; picture i of a prompt is picture i of this seed, alone or in a batch, on any mesh.
        unknown_words: words of the prompts that the model does not know.
        quantization: mode of the model; None for none.
        weights: what they take where kernels are stored quantised; None where they are not.
        seconds: that it took, compilation included.
    """

    files: tuple[Path, ...]
    step: int
    seed: int
    unknown_words: tuple[str, ...]
    quantization: str | None
    weights: StoredBytes | None
    seconds: float


def generate(
    prompts: str | Sequence[str],
    run: str | Path = shipped.DEFAULT_MODEL,
    *,
    seed: int = 0,
    num_images: int = 1,
    out: str | Path | None = None,
    recipe: Recipe | None = None,
) -> GenerateResult:
    """Makes pictures with a trained model.

    Args:
        prompts: a prompt, or several; pictures for all of them are made together.
        run: folder that `train` wrote, `RUN@STEP` for an older checkpoint, or the name of a model of the package.
        seed: of the noise.
        num_images: pictures for each prompt.
        out: folder for the files; None for `generated` in the run's folder, or here for a model of the package. No file
            is replaced.
        recipe: of the run, with another mesh or other sampling; None takes the run's own on all devices there are.

    Raises:
        UsageError: there is no such run, it has no such checkpoint, or a prompt is too long.

    Warns:
        MaxDiffusionWarning: a prompt has words that the model does not know.
    """
    began = time.perf_counter()
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or num_images < 1:
        raise UsageError("nothing to make: give one prompt or more, and num_images=1 or more")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"seed={seed}: write a whole number from 0 to {LARGEST_SEED}")
    run, step = split_place(run)
    if recipe is None:
        recipe = dataclasses.replace(recipe_at(run, step), mesh={})
    tokenizer = read_tokenizer(run, step)
    unknown = unknown_words(tokenizer, prompts, styles_in(recipe.data))
    tokenizer.encode(prompts)
    # What comes with the package stays as it is.
    home = Path() if run.is_relative_to(shipped.FOLDER) else run
    folder = home / GENERATED if out is None else as_path(out)
    _check_folder(folder)
    trained = open_trained(run, recipe, step=step)
    draw = sampler(trained.text_to_image, recipe.sample)
    pixels = draw.pictures(trained.params, tokenizer, prompts, num_images=num_images, seed=seed)
    files, weights = [], stored_bytes(trained.params)
    for row, index in np.ndindex(pixels.shape[:2]) if jax.process_index() == 0 else ():
        prompt, picture = prompts[row], pixels[row, index]
        text = {
            "prompt": prompt,
            "seed": seed,
            "index": index,
            "model": recipe.model,
            "run": run.resolve().name,
            "step": trained.step,
            "solver": recipe.sample.solver,
            "steps": recipe.sample.steps,
            "guidance_scale": recipe.sample.guidance_scale,
            "dtype": recipe.dtype,
            "quantization": recipe.quantization or "none",
            "maxdiffusion": __version__,
            "jax": jax.__version__,
        }
        files.append(write_png(folder / f"{slug(prompt)}-seed{seed}-{index}.png", picture, text))
    return GenerateResult(
        files=tuple(files),
        step=trained.step,
        seed=seed,
        unknown_words=tuple(unknown),
        quantization=recipe.quantization,
        weights=weights if weights.kernels else None,
        seconds=time.perf_counter() - began,
    )


def _check_folder(folder: Path) -> None:
    """Refuses a place where no pictures can go, before anything is compiled; one that is missing is made.

    Raises:
        UsageError: it is a file, looks like the name of one, or cannot be made.
    """
    if folder.suffix.lower() in PICTURE_SUFFIXES and not folder.is_dir():
        raise UsageError(
            f"'{folder}' is the name of a picture, and pictures get theirs from the prompt: give a folder, such as "
            f"{folder.with_suffix('')}"
        )
    if folder.is_file():
        raise UsageError(f"'{folder}' is a file: give a folder for the pictures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder '{folder}' cannot be made: {error.strerror or error}; give another one"
        ) from error


def generate_from_run(
    run: str | Path,
    prompt: str,
    *,
    recipe: Recipe | None = None,
    seed: int = 0,
    num_images: int = 1,
    out: str | Path | None = None,
) -> GenerateResult:
    """`generate` for one prompt, as the command line says it."""
    return generate([prompt], run, seed=seed, num_images=num_images, out=out, recipe=recipe)
