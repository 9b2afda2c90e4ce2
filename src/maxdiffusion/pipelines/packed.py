"""A trained model in one small folder, without the state of its training; `generate` reads it as it reads a run.

recipe.yaml            the recipe of its training
tokenizer.json         the words of the captions
weights.safetensors    the weights that pictures are made with, in float16, or quantised
made.json              their step and hash, the versions that made them, and figures

A kernel that is stored quantised is two tensors, `NAME/qvalue` and `NAME/scale`. What the format has no name for in
numpy is written as the whole numbers of its bits: float8 values as uint8, bfloat16 scales as uint16.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load, save

from maxdiffusion import __version__
from maxdiffusion.config import show
from maxdiffusion.config.load import RUN_RECIPE
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.stored import Stored
from maxdiffusion.nn.quantisation import Storage
from maxdiffusion.parallel.moments import part_sharding
from maxdiffusion.paths import as_path, is_remote
from maxdiffusion.pipelines.quantised_weights import kept
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS
from maxdiffusion.pipelines.run_folder import TOKENIZER
from maxdiffusion.pipelines.stored_layers import from_stored, stored_form
from maxdiffusion.specs import STORED_AS

MADE = "made.json"

PARTS = ("qvalue", "scale")
"""Tensors of a kernel that is stored quantised."""


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
        params: float32 weights, each whole on this host; kernels may be stored quantised, and then the others are
            written in float32, so that what is read makes the same pictures.
        step: of the weights.
        figures: what is known about them, for `made.json`.

    Returns:
        The folder.
    """
    flat: dict[Any, Any] = flatten_dict(params, sep="/")  # type: ignore[assignment]
    kernels = {str(name): leaf for name, leaf in flat.items() if isinstance(leaf, Stored)}
    dtype = np.float32 if kernels else np.float16
    tensors = {str(name): np.asarray(leaf, dtype) for name, leaf in flat.items() if name not in kernels}
    for name, leaf in kernels.items():
        tensors |= {f"{name}/{part}": _bits(np.asarray(getattr(leaf, part))) for part in PARTS}
    stored = save(tensors)
    made = {
        "step": step,
        "sha256": hashlib.sha256(stored).hexdigest(),
        "parameters": sum(math.prod(leaf.shape) for leaf in flat.values()),
        "maxdiffusion": __version__,
        "jax": jax.__version__,
        **({"quantization": STORED_AS[str(recipe.quantization)]} if kernels else {}),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_RECIPE).write_text(show.as_yaml(recipe), encoding="utf-8")
    (folder / TOKENIZER).write_text(tokenizer.as_text(), encoding="utf-8")
    (folder / PACKED_WEIGHTS).write_bytes(stored)
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return folder


def read_packed(
    folder: str | Path, like: Any, kernels: Mapping[str, Storage] = MappingProxyType({})
) -> tuple[Any, int]:
    """The weights and their step, a tensor after the other.

    Stacks of layers may be stored layer by layer, and the other way round, where nothing is stored quantised.

    Args:
        folder: of the model.
        like: tree of float32 `jax.ShapeDtypeStruct` with the shardings to read into.
        kernels: how kernels are stored quantised while they are read, by their path. Those of a file that holds them
            quantised stay as they are there.

    Raises:
        UsageError: a file is damaged, or of another model.
    """
    folder = as_path(folder)
    path = folder / PACKED_WEIGHTS
    made = json.loads((folder / MADE).read_text(encoding="utf-8"))
    found, read = _opened(path, made["sha256"])
    halves = {name.removesuffix("/qvalue") for name in found if name.endswith("/qvalue")}
    form = like
    if not halves and not kernels:
        shapes = {name: jax.ShapeDtypeStruct(tensor.shape, np.float32) for name, tensor in found.items()}
        form = stored_form(like, unflatten_dict(shapes, sep="/"))
    wanted: dict[str, jax.ShapeDtypeStruct] = flatten_dict(form, sep="/")  # type: ignore[assignment]
    there = halves | {name for name in found if name.rpartition("/")[0] not in halves}
    for name in sorted(there | wanted.keys()):
        here = wanted[name].shape if name in wanted else None
        theirs = _whole_shape(name, found, here) if name in there else None
        if here != theirs:
            keep = "model, scan_layers (kernels are read quantised)" if halves or kernels else "model"
            raise UsageError(
                f"{path} is of another model: {name} is {theirs or 'missing'} there and {here or 'missing'} here; keep "
                f"{keep}, model_config and data as they were"
            )

    def placed(name: str) -> Any:
        one = wanted[name]
        if name in found:
            if name in kernels:
                return kept([_put(read(name), one.sharding)], one, kernels[name])
            return _put(read(name).astype(np.float32), one.sharding)
        values, scale = (read(f"{name}/{part}") for part in PARTS)
        values, scale = _from_bits(values, one.shape), _from_bits(scale, None)
        packed = [axis for axis, size in enumerate(values.shape) if size != one.shape[axis]]
        stored = Stored(qvalue=values, scale=scale, packed=packed[0] - values.ndim if packed else None)
        return stored.parts(lambda part: _put(part, part_sharding(part.shape, one.shape, one.sharding)))

    tree = unflatten_dict({name: placed(name) for name in wanted}, sep="/")
    return tree if form is like else from_stored(like, tree), int(made["step"])


def stored_mode(folder: str | Path) -> str | None:
    """The mode in which a packed model's weights are stored quantised; None where they are not."""
    return json.loads((as_path(folder) / MADE).read_text(encoding="utf-8")).get("quantization")


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    """An array of the host on the devices; each gets its share alone."""
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


class _Tensor(NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    is_uint8: bool


def _opened(path: Path, digest: str) -> tuple[Mapping[str, _Tensor], Callable[[str], np.ndarray]]:
    """The tensors of a file, and what reads one; those of a local file lie on the disk until then.

    Raises:
        UsageError: its hash is another one.
    """
    whole = path.read_bytes() if is_remote(path) else None
    with io.BytesIO(whole) if whole is not None else path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise UsageError(f"{path} is damaged: get it again")
    if whole is not None:
        arrays = load(whole)
        found = {name: _Tensor(array.shape, array.dtype == np.uint8) for name, array in arrays.items()}
        return found, arrays.__getitem__
    tensors = safe_open(path, framework="numpy")
    entries = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (it is no mapping)
    found = {name: _Tensor(tuple(entry.get_shape()), entry.get_dtype() == "U8") for name, entry in entries.items()}
    return found, tensors.get_tensor


def _bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == jnp.float8_e4m3fn:
        return array.view(np.uint8)
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def _from_bits(array: np.ndarray, whole: tuple[int, ...] | None) -> np.ndarray:
    """Values or scales from what `_bits` made of them; values of a byte each are float8, two in a byte int4.

    Args:
        array: what the file holds.
        whole: shape of the kernel, for values.
    """
    if array.dtype == np.uint8 and array.shape == whole:
        return array.view(jnp.float8_e4m3fn)
    return array.view(jnp.bfloat16) if array.dtype == np.uint16 else array


def _whole_shape(name: str, found: Mapping[str, _Tensor], like: tuple[int, ...] | None) -> tuple[int, ...]:
    """Shape of a tensor of the file; of a kernel with two values in a byte, that of the kernel which is wanted."""
    if name in found:
        return found[name].shape
    shape, is_uint8 = found[f"{name}/qvalue"]
    if like is None or len(like) != len(shape) or not is_uint8:
        return shape
    return like if all(size in (whole, whole / 2) for size, whole in zip(shape, like, strict=True)) else shape
