"""A trained model with its weights stored quantised, and what that does to its pictures: all of it, and each layer."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import UInt8

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe, SampleSection
from maxdiffusion.errors import UsageError
from maxdiffusion.nn.quantisation import QuantRow, StoredBytes, stored_bytes
from maxdiffusion.nn.switched import switched
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.checkpoint_folder import recipe_folder, split_place
from maxdiffusion.pipelines.packed import is_packed, pack, stored_mode
from maxdiffusion.pipelines.picture_difference import PictureDifference, picture_difference
from maxdiffusion.pipelines.text_to_image import TextToImage, sampler
from maxdiffusion.pipelines.trained import TrainedRun, open_trained
from maxdiffusion.specs import QUANT_FIELDS

FLOORS = {"int8": 30.0, "fp8": 25.0}
"""Least PSNR in dB of quantised pictures against the unquantised ones, by mode."""

TABLE_STEPS = 4
"""Steps of the pictures that the table of layers is made with."""

MOST_ROWS = 96
"""Rows of that table; layers of a larger model are grouped by the beginnings of their paths."""


@dataclass(frozen=True, kw_only=True)
class QuantiseResult:
    """What was written.

    Attributes:
        folder: of the packed model.
        mode: how its kernels are stored.
        step: of the weights.
        weights: what they take.
        seconds: that it took.
    """

    folder: Path
    mode: str
    step: int
    weights: StoredBytes
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """What it does to the pictures when one layer alone, or a group of them, is quantised.

    Attributes:
        module: path of the layer; of a group, what their paths begin with and `*`.
        kernels: number of layers.
        excluded: whether the mode leaves it out.
        psnr: of the pictures against unquantised ones, in dB.
        ssim: structural similarity.
        features: distance of the classifier's features.
    """

    module: str
    kernels: int
    excluded: bool
    psnr: float
    ssim: float
    features: float


@dataclass(frozen=True, kw_only=True)
class QuantReport:
    """How far a quantised model's pictures are from those of the model as it is, from the same noise.

    Attributes:
        mode: how it is quantised.
        dtype: of both.
        pictures: how many.
        bytes_ratio: bytes of the kernels that are stored quantised, scales included, to those in bfloat16.
        model_bytes_ratio: the same of all weights.
        psnr: in dB over all pictures together.
        ssim: mean structural similarity.
        features: mean of 1 - cosine of the shipped classifier's features.
        floor: least PSNR that the mode promises on the shipped model; None for none.
        modules: one row for each layer or group, the worst first.
        table_steps: steps of the pictures of these rows.
        seconds: that it took, compilation included.
    """

    mode: str
    dtype: str
    pictures: int
    bytes_ratio: float
    model_bytes_ratio: float
    psnr: float
    ssim: float
    features: float
    floor: float | None
    modules: tuple[LayerRow, ...]
    table_steps: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the pictures reach the floor."""
        return self.floor is None or self.psnr >= self.floor


def quantised_recipe(place: str | Path, words: Sequence[str] = ()) -> Recipe:
    """The recipe of a trained model that is to be quantised, on all devices there are.

    Args:
        place: a run, `RUN@STEP`, or a packaged model.
        words: changes, such as `quantization=int8`.

    Raises:
        UsageError: there is no such model, a change cannot work, or the model is stored quantised already.
    """
    run, step = split_place(place)
    if is_packed(run) and stored_mode(run):
        raise UsageError(f"the weights of {run} are stored in {stored_mode(run)} already: give the run they come from")
    return load_run(recipe_folder(run, step), ["mesh=null", *words]).recipe


def quantise(place: str | Path, *, recipe: Recipe, out: str | Path) -> QuantiseResult:
    """Writes a trained model with its kernels stored quantised, for `generate`.

    Args:
        place: a run, `RUN@STEP`, or a packaged model.
        recipe: of the model, with `quantization`.
        out: folder to write; there is none yet, or it is empty.

    Raises:
        UsageError: there is no such model, or the folder holds anything.
    """
    began = time.perf_counter()
    run, step = split_place(place)
    folder = as_path(out)
    if is_packed(folder):
        raise UsageError(f"{folder} holds a model already: name another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder for the model")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: name another folder for the model")
    trained = open_trained(run, recipe, step=step)
    sampler(trained.text_to_image, recipe.sample)  # refuses what `generate` would refuse of the model
    pack(
        folder,
        recipe=dataclasses.replace(recipe, run=None, resume=False, mesh={}, virtual_devices=None),
        tokenizer=trained.tokenizer,
        params=jax.tree.map(np.asarray, trained.params),
        step=trained.step,
        figures={},
    )
    return QuantiseResult(
        folder=folder,
        mode=str(recipe.quantization),
        step=trained.step,
        weights=stored_bytes(trained.params),
        seconds=time.perf_counter() - began,
    )


def report(
    place: str | Path,
    *,
    recipe: Recipe,
    prompts: Sequence[str] = (),
    table: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> QuantReport:
    """Compares a model's pictures with and without quantisation, from the same noise.

    Args:
        place: a run, `RUN@STEP`, or a packaged model.
        recipe: of the model, with `quantization`; its `sample` section says how pictures are made.
        prompts: none for those of the recipe's sample grids.
        table: whether each layer is tried alone.
        say: is told of each part.

    Raises:
        UsageError: there is no such model, or no prompt.
    """
    began = time.perf_counter()
    run, step = split_place(place)
    prompts = tuple(prompts) or recipe.sample.prompts
    if not prompts:
        raise UsageError("the recipe has no sample.prompts: name some with --prompt")
    plain = dataclasses.replace(
        recipe, sample=dataclasses.replace(recipe.sample, precise_first_steps=0, precise_last_steps=0), **_UNQUANTISED
    )
    base, small = open_trained(run, plain, step=step), open_trained(run, recipe, step=step)

    def paint(trained: TrainedRun, section: SampleSection) -> np.ndarray:
        return _pictures(sampler(trained.text_to_image, section), trained, prompts, recipe.sample)

    say("pictures of the model as it is")
    wanted = paint(base, plain.sample)
    say(f"pictures with quantization={recipe.quantization}")
    found = picture_difference(paint(small, recipe.sample), wanted)
    size = stored_bytes(small.params)
    rows: tuple[LayerRow, ...] = ()
    if table:
        rows = _table(base, small.text_to_image, prompts, recipe, say)
    return QuantReport(
        mode=str(recipe.quantization),
        dtype=recipe.dtype,
        pictures=len(wanted),
        bytes_ratio=size.ratio,
        model_bytes_ratio=size.model_ratio,
        psnr=found.psnr,
        ssim=found.ssim,
        features=found.features,
        floor=FLOORS.get(str(recipe.quantization)),
        modules=rows,
        table_steps=TABLE_STEPS,
        seconds=time.perf_counter() - began,
    )


_UNQUANTISED: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Recipe) if field.name in QUANT_FIELDS
}


def _pictures(
    draw: Any, trained: TrainedRun, prompts: Sequence[str], section: SampleSection
) -> UInt8[np.ndarray, "pictures height width 3"]:
    drawn = draw.pictures(
        trained.params, trained.tokenizer, prompts, num_images=section.num_per_prompt, seed=section.seed
    )
    return drawn.reshape(-1, *drawn.shape[2:])


def _table(
    base: TrainedRun, small: TextToImage, prompts: Sequence[str], recipe: Recipe, say: Callable[[str], None]
) -> tuple[LayerRow, ...]:
    """Each layer or group quantised alone, the excluded ones as well; pictures of few steps, one a prompt."""
    section = dataclasses.replace(
        recipe.sample, steps=TABLE_STEPS, precise_first_steps=0, precise_last_steps=0, num_per_prompt=1
    )
    rows = small.model.ledger()
    every = small.model.clone(parent=None, qwix_module_path=".*", quantization_exclude=())
    subject = dataclasses.replace(small, model=every)
    trial = _rounding if recipe.quantization == "int4" else _switching
    draw = trial(base, subject, [row.module for row in rows], section)

    def paint(chosen: Sequence[str]) -> np.ndarray:
        return _pictures(draw(frozenset(chosen)), base, prompts, section)

    wanted, found = paint(()), []
    groups = grouped(rows, MOST_ROWS)
    for number, (name, members) in enumerate(groups.items(), 1):
        say(f"{number} of {len(groups)}: {name}")
        difference: PictureDifference = picture_difference(paint([row.module for row in members]), wanted)
        found.append(
            LayerRow(
                module=name,
                kernels=len(members),
                excluded=members[0].mode is None,
                psnr=difference.psnr,
                ssim=difference.ssim,
                features=difference.features,
            )
        )
    return tuple(sorted(found, key=lambda row: row.psnr))


def grouped(rows: Sequence[QuantRow], most: int) -> dict[str, list[QuantRow]]:
    """Layers by a name: their own where there are no more than so many, else what their paths begin with.

    Excluded layers are never in one group with others.

    Args:
        rows: of the ledger.
        most: number of groups; more only where the first parts of the paths are more.
    """
    deepest = max(row.module.count("/") for row in rows) + 1
    groups: dict[tuple[str, bool], list[QuantRow]] = {}
    for depth in range(deepest, 0, -1):
        groups = {}
        for row in rows:
            groups.setdefault(("/".join(row.module.split("/")[:depth]), row.mode is None), []).append(row)
        if len(groups) <= most:
            break
    named: dict[str, list[QuantRow]] = {}
    for (begin, out), members in groups.items():
        alone = len(members) == 1
        named[members[0].module if alone else f"{begin}/*{' (excluded)' if out else ''}"] = members
    return named


def _switching(
    base: TrainedRun, subject: TextToImage, modules: Sequence[str], section: SampleSection
) -> Callable[[frozenset[str]], Any]:
    """Samplers with the products of some layers quantised: one program, which takes a flag for each layer."""
    plain = sampler(subject, section)
    draw: Any = plain.draw
    inner = draw.__wrapped__

    @functools.partial(jax.jit, out_shardings=subject.layout.replicated)
    def run(on: dict[str, Any], *arguments: Any) -> Any:
        with switched(on):
            return inner(*arguments)

    def chosen(some: frozenset[str]) -> Any:
        on = {module: jnp.asarray(module in some) for module in modules}
        return dataclasses.replace(plain, draw=functools.partial(run, on))

    return chosen


def _rounding(
    base: TrainedRun, subject: TextToImage, modules: Sequence[str], section: SampleSection
) -> Callable[[frozenset[str]], Any]:
    """Samplers with the kernels of some layers rounded: the program of the model as it is, with other weights."""
    plain = sampler(base.text_to_image, section)
    kernels = subject.model.storages()

    def rounded(params: Any, some: frozenset[str]) -> Any:
        flat: dict[Any, Any] = flatten_dict(params, sep="/")  # type: ignore[assignment]
        for name, storage in kernels.items():
            if name.rpartition("/")[0] in some:
                flat[name] = storage.of(flat[name]).whole(jnp.float32)
        return unflatten_dict(flat, sep="/")

    def chosen(some: frozenset[str]) -> Any:
        return dataclasses.replace(plain, draw=lambda params, *arguments: plain.draw(rounded(params, some), *arguments))

    return chosen
