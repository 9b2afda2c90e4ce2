"""A network, a process and a meaning of the prediction make one thing that can be trained and sampled from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt8

from maxdiffusion.config.schema import DataSection, DiffusionSection, Recipe, SampleSection
from maxdiffusion.data.pictures import STYLES
from maxdiffusion.data.source import to_pixels
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.denoiser import CacheState, Denoiser
from maxdiffusion.diffusion.grid import Grid, make_grid
from maxdiffusion.diffusion.guidance import CondPair, classifier_free, halves, interleave
from maxdiffusion.diffusion.noise import noise, step_noise
from maxdiffusion.diffusion.prediction import Prediction
from maxdiffusion.diffusion.process import FlowMatching, Process, VariancePreserving
from maxdiffusion.diffusion.sample import run, start
from maxdiffusion.diffusion.solvers import get_solver
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.stored import is_stored
from maxdiffusion.models.pictures import Pictures
from maxdiffusion.models.registry import MODELS, lookup
from maxdiffusion.nn.model import EXECUTION, float_dtype
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.multihost import everywhere

LARGEST_BATCH = 128
"""Pictures that are sampled at once, at most (rounded up to what the mesh divides)."""


@dataclass(frozen=True, kw_only=True)
class TextToImage:
    """What training and sampling share.

    Attributes:
        model: the network; its layout says where everything lives.
        process: how noise is mixed in.
        prediction: what the network predicts.
        image_shape: height, width and channels of a picture.
        weights_dtype: dtype that weights are rounded to where they are used, in training and in sampling alike.
    """

    model: Pictures
    process: Process
    prediction: Prediction
    image_shape: tuple[int, int, int]
    weights_dtype: Any = jnp.float32

    @property
    def layout(self) -> Layout:
        """Where every array lives."""
        return self.model.layout

    def used(self, params: Any) -> Any:
        """The weights as the network uses them, from float32 ones; what is stored quantised is used as it is."""
        dtype = jnp.dtype(self.weights_dtype)
        return jax.tree.map(lambda leaf: leaf if is_stored(leaf) else leaf.astype(dtype), params, is_leaf=is_stored)

    def denoiser(self, params: Any) -> Denoiser:
        """The network with these parameters; its condition is (text, mask), the text encoded or as word ids.

        Word ids are encoded in the call, as training needs it; sampling encodes once and hands the `TextOutput` on.
        """

        params = self.used(params)

        def denoise(cache: CacheState, x: Array, timestep: Array, cond: Any) -> tuple[CacheState, Array]:
            text, mask = cond
            method = None if isinstance(text, jax.Array) else "denoise"
            return cache, self.model.apply({"params": params}, x, timestep, text, mask, method=method)  # type: ignore[return-value]

        return denoise

    def grid(self, num_steps: int) -> Grid:
        """The usual grid of the process with this number of steps."""
        return make_grid(self.process, num_steps, "uniform" if isinstance(self.process, FlowMatching) else "trailing")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Pictures for texts; every call of one batch size runs the same compiled program. Make one with `sampler`.

    Attributes:
        text_to_image: network and process.
        draw: the compiled function `(params, ids, mask, empty ids, empty mask, key, indices) -> pictures`.
        guided: the network runs on two halves a sample, so that one sample keeps two devices of the batch busy.
    """

    text_to_image: TextToImage
    draw: Callable[..., Array]
    guided: bool

    def pictures(
        self,
        params: Any,
        tokenizer: WordTokenizer,
        prompts: Sequence[str],
        *,
        num_images: int,
        seed: int,
        indices: Int[np.ndarray, " rows"] | None = None,
    ) -> UInt8[np.ndarray, "prompts num_images height width channels"]:
        """Pictures of this seed for each prompt, as pixels.

        Args:
            params: weights, laid out on the mesh.
            tokenizer: of the model.
            prompts: texts, none too long.
            num_images: pictures for each prompt.
            seed: of the noise.
            indices: which picture of the seed each row is, prompt by prompt; None for 0, 1, ... of each prompt.
        """
        texts = tokenizer.encode([prompt for prompt in prompts for _ in range(num_images)])
        indices = np.tile(np.arange(num_images), len(prompts)) if indices is None else indices
        drawn = to_pixels(self(params, texts, tokenizer.encode([""]), seed=seed, indices=indices))
        return drawn.reshape(len(prompts), num_images, *drawn.shape[1:])

    def __call__(
        self,
        params: Any,
        texts: tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]],
        empty: tuple[Int[np.ndarray, "1 length"], Bool[np.ndarray, "1 length"]],
        *,
        seed: int,
        indices: Int[np.ndarray, " rows"],
    ) -> Float[np.ndarray, "rows height width channels"]:
        """One picture a row; it depends on (params, text, seed, index) of the row, not on the others or the mesh.

        Rows are padded to a whole number of equal batches that the mesh divides, and what was padded is dropped.

        Args:
            params: weights, laid out on the mesh.
            texts: word ids and mask of each row.
            empty: ids and mask of the empty text, which guidance goes away from.
            seed: of the noise.
            indices: which picture of this seed each row is.

        Returns:
            float32, about -1 to 1, not clipped.
        """
        rows = len(indices)
        layout = self.text_to_image.layout
        unit, replicated = layout.batch_divisor, layout.replicated
        if self.guided:
            unit //= math.gcd(unit, 2)
        size = min(_ceil(rows, unit), _ceil(LARGEST_BATCH, unit))
        padded = np.arange(_ceil(rows, size)) % rows
        key = everywhere(jax.random.key(seed), replicated)
        constants = [everywhere(array, replicated) for array in empty]
        pictures = []
        for begin in range(0, len(padded), size):
            chosen = padded[begin : begin + size]
            arrays = [texts[0][chosen], texts[1][chosen], indices[chosen].astype(np.int32)]
            ids, mask, index = (_put(array, layout) for array in arrays)
            pictures.append(np.asarray(self.draw(params, ids, mask, *constants, key, index)))
        return np.concatenate(pictures)[:rows]


def sampler(text_to_image: TextToImage, section: SampleSection) -> Sampler:
    """The sampler with these settings; nothing is compiled before the first call.

    Args:
        text_to_image: network and process.
        section: solver, number of steps and guidance.

    Raises:
        UsageError: the settings do not fit the process.
    """
    solver, grid, prediction = get_solver(section.solver), text_to_image.grid(section.steps), text_to_image.prediction
    text_to_image.process.check(prediction)
    scale = 1 if section.guidance_scale == 1 else section.guidance_scale
    parts = _parts(text_to_image, grid, section)

    def draw(params: Any, ids: Array, mask: Array, empty: Array, empty_mask: Array, key: Array, index: Array) -> Array:
        used = text_to_image.used(params)

        def condition(ids: Array, mask: Array) -> Any:
            return text_to_image.model.apply({"params": used}, ids, mask, method="encode"), mask

        if scale == 1:
            cond = CondPair(positive=condition(ids, mask), negative=None)
        else:
            # The empty text is encoded with every text: what guidance doubles shares the mesh from here on.
            both = condition(
                interleave(ids, jnp.broadcast_to(empty, ids.shape)),
                interleave(mask, jnp.broadcast_to(empty_mask, mask.shape)),
            )
            leaves, form = jax.tree.flatten(both)
            parted = [halves(leaf) for leaf in leaves]
            positive, negative = (form.unflatten(half) for half in zip(*parted, strict=True))
            cond = CondPair(positive=positive, negative=negative)
        x = noise(key, index, text_to_image.image_shape) * text_to_image.process.prior_std
        rows = text_to_image.layout.rows(x.shape[0])
        x = x if rows is None else jax.lax.with_sharding_constraint(x, rows)
        steps = step_noise(key, index, text_to_image.image_shape) if solver.stochastic else None
        state = start(x, solver=solver)
        for part, subject in parts:
            denoiser = classifier_free(subject.denoiser(params), scale=scale)
            state, _ = run(denoiser, state, part, cond, solver=solver, prediction=prediction, noise=steps)
        return state.x

    return Sampler(
        text_to_image=text_to_image,
        draw=jax.jit(draw, out_shardings=text_to_image.layout.replicated),
        guided=scale != 1,
    )


def _parts(subject: TextToImage, grid: Grid, section: SampleSection) -> list[tuple[Grid, TextToImage]]:
    """The steps of a grid, in order, each part with what it is sampled with: the first and last ones may be precise.

    Raises:
        UsageError: precise steps of a model whose products are precise anyway.
    """
    first = min(section.precise_first_steps, grid.num_steps)
    last = min(section.precise_last_steps, grid.num_steps - first)
    if not section.precise_first_steps + section.precise_last_steps:
        return [(grid, subject)]
    mode = subject.model.quantization
    if mode in (None, "int4"):
        why = "has no quantised products" if mode is None else "rounds kernels alone, which are stored so"
        key = "precise_first_steps" if section.precise_first_steps else "precise_last_steps"
        raise UsageError(
            f"sample.{key}={getattr(section, key)} is of no use: a model with quantization={mode or 'null'} {why}; "
            "write quantization=int8 or fp8, or leave it out"
        )
    precise = dataclasses.replace(subject, model=subject.model.unquantized())
    ends = [(0, first, precise), (first, grid.num_steps - last, subject), (grid.num_steps - last, None, precise)]
    return [
        (grid.part(begin, end), what) for begin, end, what in ends if begin < (grid.num_steps if end is None else end)
    ]


def text_to_image_of(recipe: Recipe, *, mesh: Mesh | None, vocab_size: int, max_length: int) -> TextToImage:
    """What a recipe describes, on a mesh.

    Args:
        recipe: of the training, or of a run.
        mesh: devices.
        vocab_size: of the tokenizer.
        max_length: of the tokenizer.

    Raises:
        UsageError: the model cannot be trained here, or a value of the recipe cannot work.
    """
    if lookup(recipe.model).denoiser is not Pictures:
        able = ", ".join(name for name, spec in MODELS.items() if spec.denoiser is Pictures)
        raise UsageError(f"model={recipe.model} cannot be trained or sampled from here yet: write model={able}")
    size = recipe.data.size
    given = {"image_size": size, "vocab_size": vocab_size, "max_length": max_length}
    clash = next((name for name in given if name in recipe.model_config), None)
    if clash:
        cause = "data.size" if clash == "image_size" else "the captions"
        raise UsageError(f"model_config.{clash} follows from {cause}: leave it out")
    execution = next((name for name in EXECUTION if name in recipe.model_config), None)
    if execution:
        raise UsageError(f"model_config.{execution} says how the model runs: write {execution}=... at the top level")
    model = lookup(recipe.model).build(
        **{
            **recipe.model_config,
            **given,
            **{name: getattr(recipe, name) for name in EXECUTION},
            "mesh": mesh,
            "logical_axis_rules": recipe.rules,
            "weights_dtype": "float32",
        }
    )
    assert isinstance(model, Pictures)
    process = process_of(recipe.diffusion)
    process.check(recipe.diffusion.prediction)
    return TextToImage(
        model=model,
        process=process,
        prediction=recipe.diffusion.prediction,
        image_shape=(size, size, model.image_channels),
        weights_dtype=float_dtype(recipe.weights_dtype, "weights_dtype"),
    )


def styles_in(section: DataSection) -> tuple[str, ...]:
    """The styles that captions of this data name; none where it is not the built-in set."""
    if section.source != "pictures":
        return ()
    return STYLES if section.styles is None else section.styles


def process_of(section: DiffusionSection) -> Process:
    """The process that a recipe names."""
    if section.process == "flow":
        return FlowMatching(shift=section.shift)
    return VariancePreserving(zero_terminal_snr=section.zero_terminal_snr)


def _put(array: np.ndarray, layout: Layout) -> Array:
    """A host array that every process has whole, laid out with its first dimension as the batch."""
    sharding = layout.rows(array.shape[0])
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit) * unit
