"""What the shipped classifier sees in pictures: the features by which generated pictures are compared with real ones.

It was trained on the split `train` of the built-in pictures by `scripts/train_picture_classifier.py`;
`shipped/picture-classifier.json` has its figures.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Float, Int, UInt8
from safetensors.numpy import load

from maxdiffusion.data.pictures import STYLES, concept_names
from maxdiffusion.errors import UsageError
from maxdiffusion.models.picture_classifier import PictureClassifier, unit

NAME = "picture-classifier"
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the classifier says about pictures, one row a picture.

    Attributes:
        features: of length 1, float32.
        concepts: numbers of the likeliest concepts in `data.pictures.concept_names()`.
    """

    features: Float[np.ndarray, "pictures features"]
    concepts: Int[np.ndarray, " pictures"]


def look(pictures: UInt8[np.ndarray, "pictures height width 3"]) -> Seen:
    """Looks at pictures of any size, on one device of this process.

    Raises:
        UsageError: the classifier's file is damaged.
    """
    params = _params()
    padded = -len(pictures) % _ROWS
    rows = np.concatenate([pictures, np.zeros((padded, *pictures.shape[1:]), np.uint8)])
    parts = [_look(params, rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
    features, concepts = (np.concatenate(column)[: len(pictures)] for column in zip(*parts, strict=True))
    return Seen(features=features, concepts=concepts)


@functools.cache
def _model() -> PictureClassifier:
    return PictureClassifier(num_concepts=len(concept_names()), num_styles=len(STYLES))


@jax.jit
def _look(params: Any, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    seen = _model().apply({"params": params}, pixels.astype(jnp.float32) / 127.5 - 1)
    return unit(seen.features), seen.concepts.argmax(axis=1)  # type: ignore[union-attr]


@functools.cache
def _params() -> Any:
    folder = files("maxdiffusion").joinpath("shipped")
    stored = folder.joinpath(f"{NAME}.safetensors").read_bytes()
    if hashlib.sha256(stored).hexdigest() != json.loads(folder.joinpath(f"{NAME}.json").read_text())["sha256"]:
        raise UsageError("the classifier of the built-in pictures is damaged: install maxdiffusion again")
    return unflatten_dict({name: leaf.astype(np.float32) for name, leaf in load(stored).items()}, sep="/")
