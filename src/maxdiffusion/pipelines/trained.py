"""A trained run, opened: its recipe, words, network and the weights of a step, laid out on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import UsageError
from maxdiffusion.nn.model import DiffusionModel, float_dtype
from maxdiffusion.nn.quantisation import Storage, say_bytes, stored_bytes
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.checkpoint_folder import chosen_step
from maxdiffusion.pipelines.packed import is_packed, read_packed, stored_mode
from maxdiffusion.pipelines.quantised_weights import read_quantised
from maxdiffusion.pipelines.run_folder import TOKENIZER, read_weights, weight_shapes
from maxdiffusion.pipelines.text_to_image import TextToImage, text_to_image_of
from maxdiffusion.specs import QUANT_FIELDS, QUANT_KEYWORDS, STORED_AS, QuantSpec


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """What pictures are made with.

    Attributes:
        tokenizer: of the captions.
        text_to_image: network and process; its layout says where everything lives.
        params: the averaged weights if the run averages them, float32, else the trained ones in their dtype; laid out.
            With `quantization`, kernels are stored quantised.
        step: of the weights.
    """

    tokenizer: WordTokenizer
    text_to_image: TextToImage
    params: Any
    step: int


def read_tokenizer(run: str | Path, step: int | None = None) -> WordTokenizer:
    """The words of a run.

    Raises:
        UsageError: the run has no such checkpoint.
    """
    if not is_packed(run):
        chosen_step(run, step)
    return WordTokenizer.load(as_path(run) / TOKENIZER)


def open_trained(run: str | Path, recipe: Recipe, *, step: int | None = None) -> TrainedRun:
    """Reads a run onto the mesh of a recipe.

    Args:
        run: folder that `train` wrote, or a packed model's.
        recipe: of the run, perhaps with another mesh or other sampling.
        step: of the weights; None for the newest.

    Raises:
        UsageError: there is no such checkpoint, or it is of another model.
    """
    tokenizer = read_tokenizer(run, step)
    mesh = build_mesh(recipe.mesh_spec)
    subject = text_to_image_of(recipe, mesh=mesh, vocab_size=tokenizer.vocab_size, max_length=tokenizer.max_length)
    kernels = _kernels(run, subject.model, recipe)
    params, step = read_trained(run, subject.model, recipe, step=step, kernels=kernels)
    if kernels:
        say_bytes(stored_bytes(params), subject.model.quantization)
    return TrainedRun(tokenizer=tokenizer, text_to_image=subject, params=params, step=step)


def read_trained(
    run: str | Path,
    model: DiffusionModel,
    recipe: Recipe,
    *,
    step: int | None = None,
    kernels: Mapping[str, Storage] = MappingProxyType({}),
) -> tuple[Any, int]:
    """The weights that pictures are made with, float32 or in the dtype that they were trained in, and their step.

    Args:
        run: folder that `train` wrote, or a packed model's.
        model: says where they live.
        recipe: that they were trained with.
        step: of the weights; None for the newest. A packed model has one.
        kernels: how kernels are stored quantised while they are read, by their path.

    Raises:
        UsageError: there is no such checkpoint, or it is of another model.
    """
    shapes = weight_shapes(model)
    if is_packed(run):
        return read_packed(run, shapes, kernels)
    master = float_dtype(recipe.train.master_dtype, "master_dtype")
    if kernels:
        return read_quantised(run, shapes, kernels, master_dtype=master, step=step)
    return read_weights(run, shapes, master_dtype=master, step=step)


def _kernels(run: str | Path, model: DiffusionModel, recipe: Recipe) -> Mapping[str, Storage]:
    """How kernels are stored quantised while they are read; none without `quantization`.

    Raises:
        UsageError: the weights are stored in another mode, or with another calibration.
    """
    mode = model.quantization
    if mode is None:
        return {}
    there = stored_mode(run) if is_packed(run) else None
    if there not in (None, STORED_AS[mode]):
        raise UsageError(
            f"the weights of {run} are stored in {there}: leave quantization={mode} out, or make them anew from the "
            f"run (maxdiffusion quantize RUN --mode {mode} --out DIR)"
        )
    storages = model.storages()
    if there:
        key = QUANT_KEYWORDS["weights"]
        own, made = model.runtime.quant, _quant_of(run, model)
        changed = next((name for name in storages if own.stored_as(_layer(name)) != made.stored_as(_layer(name))), None)
        if changed:
            (was, how), (now, asked) = (one.stored_as(_layer(changed)) for one in (made, own))
            raise UsageError(
                f"the kernel of {_layer(changed)} is stored in {was} ({key}={how}) in {run}, and would be in {now} "
                f"({key}={asked}): leave {key}, quantization_exclude and qwix_module_path as they are there, or make "
                f"them anew from the run (maxdiffusion quantize RUN KEY=VALUE --mode {there} --out DIR)"
            )
    return storages


def _layer(kernel: str) -> str:
    return kernel.rpartition("/")[0]


def _quant_of(run: str | Path, model: DiffusionModel) -> QuantSpec:
    """How a packed model was quantised when it was made."""
    saved = load_run(run).recipe
    words = {name: getattr(saved, name) for name in QUANT_FIELDS}
    return model.clone(parent=None, **words).runtime.quant
