"""A trained model in one small folder, without the state of its training; `generate` reads it as it reads a run.

recipe.yaml            the recipe of its training
tokenizer.json         the words of the captions
weights.safetensors    the weights that pictures are made with, in float16
made.json              their step and hash, the versions that made them, and figures
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load, save

from maxdiffusion import __version__
from maxdiffusion.config import show
from maxdiffusion.config.load import RUN_RECIPE
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS
from maxdiffusion.pipelines.run_folder import TOKENIZER

MADE = "made.json"


def is_packed(folder: str | Path) -> bool:
    """Whether a folder holds a model in this form."""
    return (as_path(folder) / PACKED_WEIGHTS).is_file()


def pack(
    folder: Path, *, recipe: Recipe, tokenizer: WordTokenizer, params: Any, step: int, figures: Mapping[str, Any]
) -> Path:
    """Writes trained weights in this form.

    Args:
        folder: of the model; it is made, and files in it are replaced.
        recipe: of the training, without what only its machine had (folder, mesh).
        tokenizer: of the captions.
        params: float32 weights, each whole on this host.
        step: of the weights.
        figures: what is known about them, for `made.json`.

    Returns:
        The folder.
    """
    half = {str(name): np.asarray(leaf, np.float16) for name, leaf in flatten_dict(params, sep="/").items()}
    stored = save(half)
    made = {
        "step": step,
        "sha256": hashlib.sha256(stored).hexdigest(),
        "parameters": sum(leaf.size for leaf in half.values()),
        "maxdiffusion": __version__,
        "jax": jax.__version__,
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_RECIPE).write_text(show.as_yaml(recipe), encoding="utf-8")
    (folder / TOKENIZER).write_text(tokenizer.as_text(), encoding="utf-8")
    (folder / PACKED_WEIGHTS).write_bytes(stored)
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return folder


def read_packed(folder: str | Path, like: Any) -> tuple[Any, int]:
    """The weights and their step.

    Args:
        folder: of the model.
        like: tree of float32 `jax.ShapeDtypeStruct` with the shardings to read into.

    Raises:
        UsageError: a file is damaged, or of another model.
    """
    folder = as_path(folder)
    stored, made = (folder / PACKED_WEIGHTS).read_bytes(), json.loads((folder / MADE).read_text(encoding="utf-8"))
    if hashlib.sha256(stored).hexdigest() != made["sha256"]:
        raise UsageError(f"{folder / PACKED_WEIGHTS} is damaged: get it again")
    found: dict[str, np.ndarray] = load(stored)
    wanted: dict[str, jax.ShapeDtypeStruct] = flatten_dict(like, sep="/")  # type: ignore[assignment]
    for name in sorted(found.keys() | wanted.keys()):
        here = wanted[name].shape if name in wanted else "missing"
        there = found[name].shape if name in found else "missing"
        if here != there:
            raise UsageError(
                f"{folder / PACKED_WEIGHTS} is of another model: {name} is {there} there and {here} here; keep model, "
                "model_config and data as they were"
            )

    def placed(name: str) -> jax.Array:
        whole = found[name].astype(np.float32)
        return jax.make_array_from_callback(whole.shape, wanted[name].sharding, lambda index: whole[index])

    return unflatten_dict({name: placed(name) for name in wanted}, sep="/"), int(made["step"])
