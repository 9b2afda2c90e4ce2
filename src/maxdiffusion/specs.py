"""The values that are sections of a recipe and arguments of the code below at once; no jax here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Literal, get_args

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import MeshError, UsageError, nearest

MESH_AXES = ("stage", "data", "fsdp", "cfg", "context", "tensor")
"""Axes of a mesh that we build, outermost first: neighbours on the last axis talk the most."""

THREADS_PER_DEVICE = 4
"""Threads that XLA's CPU runtime gets for each virtual device.

A collective blocks a thread until all devices have come, and a device runs collectives that do not depend on each other
at once: with one thread a device, which a small machine gets from XLA, some devices can hold all threads while they
wait for the others, for ever."""

AttentionKernel = Literal["dot_product", "flash"]
ContextAttention = Literal["auto", "gather", "ring", "ulysses", "hybrid"]
RematPolicy = Literal["none", "minimal", "full", "offload"]
RematName = Literal["qkv", "attention", "attention_output", "hidden", "feed_forward"]
PipelineSchedule = Literal["gpipe", "circular"]
QuantMode = Literal["int8", "fp8", "fp8_full", "int4"]
StoredAs = Literal["int8", "fp8", "int4"]
Precision = Literal["default", "high", "highest"]

STORED_AS: Mapping[str, StoredAs] = MappingProxyType({"int8": "int8", "fp8": "fp8", "fp8_full": "fp8", "int4": "int4"})
"""How kernels of quantised layers are stored, by mode."""


def names_in(text: str) -> tuple[str, ...]:
    """The names of a text with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _one_of(value: str, kind: object, name: str) -> None:
    options = get_args(kind)
    if value not in options:
        raise UsageError(f"{name}={value!r} is unknown: {nearest(str(value), options)}")


@dataclass(frozen=True, init=False)
class MeshSpec:
    """How many devices lie on each mesh axis, within a slice (`ici`) and across slices (`dcn`).

    `MeshSpec(data=4, tensor=2)`; one size may be -1 and takes the devices that are left. With no -1 and no size for
    the data axis, the data axis takes what is left, so `MeshSpec(tensor=2)` uses every device.

    Attributes:
        axes: names of the mesh axes, outermost first.
        ici: size of each axis within a slice, in the order of `axes`; at most one is -1.
        dcn: size of each axis across slices, in the order of `axes`.

    Raises:
        MeshError: an unknown axis, a size that is neither positive nor -1, more than one -1, or names of axes that
            cannot be.
    """

    axes: tuple[str, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    def __init__(self, *, axes: tuple[str, ...] = MESH_AXES, dcn: Mapping[str, int] | None = None, **ici: int) -> None:
        axes = _axis_names(axes)
        dcn = dict(dcn or {})
        for label, sizes in (("", ici), ("dcn.", dcn)):
            for name, size in sizes.items():
                if name not in axes:
                    raise MeshError(f"mesh axis '{label}{name}' is unknown: {nearest(name, axes)}")
                if isinstance(size, bool) or not isinstance(size, Integral) or (size < 1 and (size != -1 or label)):
                    allowed = "a whole number of slices, 1 or more" if label else "1 or more, or -1 for what is left"
                    raise MeshError(f"mesh axis {label}{name}={size!r}: write {allowed}")
        free = [name for name, size in ici.items() if size == -1]
        if len(free) > 1:
            raise MeshError(f"mesh axes {' and '.join(free)} are both -1: only one axis can take what is left")
        object.__setattr__(self, "axes", axes)
        if not free and self.rest not in ici:
            ici = {**ici, self.rest: -1}
        object.__setattr__(self, "ici", tuple(ici.get(name, 1) for name in axes))
        object.__setattr__(self, "dcn", tuple(dcn.get(name, 1) for name in axes))

    @property
    def rest(self) -> str:
        """The axis that takes the devices that are left where nothing is said of it: `data`, or else the first."""
        return "data" if "data" in self.axes else self.axes[0]

    @classmethod
    def parse(cls, text: str, *, axes: tuple[str, ...] = MESH_AXES) -> MeshSpec:
        """The spec written as `data=4,tensor=2` (`dcn.data=2` for an axis across slices).

        Raises:
            MeshError: the text is not of that form, or the spec is not valid.
        """
        axes = _axis_names(axes)
        ici: dict[str, int] = {}
        dcn: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not re.fullmatch(r"-?[0-9]{1,9}", size):
                raise MeshError(f"mesh '{part}' is not AXIS=SIZE: write for example data=4,tensor=2")
            target, name = (dcn, name[4:]) if name.startswith("dcn.") else (ici, name)
            if name not in axes:
                raise MeshError(f"mesh axis '{name}' is unknown: {nearest(name, axes)}")
            if name in target:
                raise MeshError(f"mesh axis '{name}' is given twice in '{text}'")
            target[name] = int(size)
        return cls(axes=axes, dcn=dcn, **ici)

    def shape(self, num_devices: int | None = None) -> dict[str, int]:
        """Size of each mesh axis, slices included, for `num_devices` devices.

        Args:
            num_devices: devices to lay out; None makes a -1 axis 1.

        Raises:
            MeshError: the sizes do not multiply to `num_devices`.
        """
        sizes = [inner * outer for inner, outer in zip(self.ici, self.dcn, strict=True)]
        fixed = math.prod(abs(size) for size in sizes)
        total = fixed if num_devices is None else num_devices
        free = [index for index, size in enumerate(sizes) if size < 0]
        if free and total % fixed == 0:
            sizes[free[0]] = abs(sizes[free[0]]) * (total // fixed)
        if math.prod(abs(size) for size in sizes) != total or any(size < 0 for size in sizes):
            raise MeshError(self._wrong_product(fixed, total))
        return dict(zip(self.axes, sizes, strict=True))

    def _wrong_product(self, fixed: int, total: int) -> str:
        terms = [
            f"{name} {inner}" + (f" x {outer} slices" if outer > 1 else "")
            for name, inner, outer in zip(self.axes, self.ici, self.dcn, strict=True)
            if (abs(inner), outer) != (1, 1)
        ]
        equation = " x ".join(terms) or "1"
        slices = math.prod(self.dcn)
        if total % slices:
            return f"mesh {equation} = {fixed} devices, but there are {total}: they make no {slices} equal slices"
        shapes = "; ".join(_nearest_shapes(dict(zip(self.axes, self.ici, strict=True)), total // slices))
        hint = f"legal shapes nearest to it: {shapes}" if shapes else f"ask for at most {total} devices"
        return f"mesh {equation} = {fixed} devices, but there are {total}: {hint}"

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in zip(self.axes, self.ici, strict=True) if size != 1]
        parts += [f"dcn.{name}={size}" for name, size in zip(self.axes, self.dcn, strict=True) if size != 1]
        return ",".join(parts) or f"{self.axes[0]}=1"


def _axis_names(axes: Iterable[str]) -> tuple[str, ...]:
    """Names that the axes of one mesh can have."""
    axes = tuple(axes)
    if not axes:
        raise MeshError("a mesh has no axes: name one or more, for example data")
    for name in axes:
        if axes.count(name) > 1:
            raise MeshError(f"mesh axis '{name}' is named twice: mesh axes need different names")
        if name in ("axes", "dcn"):
            raise MeshError(f"no mesh axis can be named '{name}', a keyword of MeshSpec: choose another name")
    return axes


def _nearest_shapes(wanted: dict[str, int], total: int, most: int = 3) -> list[str]:
    """Legal shapes that change one or two of the axes in use the least, as `data=4,tensor=2`."""
    used = [name for name, size in wanted.items() if size != 1] or list(wanted)[:1]
    shapes: list[dict[str, int]] = [{}]
    for name in used[:-1]:
        shapes = [
            {**shape, name: size}
            for shape in shapes
            for size in range(1, total + 1)
            if total % (size * math.prod(shape.values())) == 0
        ][:5000]
    full = [{**shape, used[-1]: total // math.prod(shape.values())} for shape in shapes] if total > 0 else []

    def distance(shape: dict[str, int]) -> float:
        return sum(abs(math.log2(shape[name] / abs(wanted[name]))) for name in used)

    return [",".join(f"{k}={v}" for k, v in shape.items()) for shape in sorted(full, key=distance)[:most]]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Which attention kernel runs, with which tiles, and what devices that share a sequence exchange.

    Attributes:
        kernel: `dot_product` (scores in memory) or `flash` (online softmax, no score matrix in memory).
        flash_min_seq_length: below this many keys or queries `flash` uses the dot-product kernel, same numbers.
        block_sizes: tiles of the flash kernel; None lets the kernel choose.
        context: how a sequence that is cut over mesh axes is attended: `gather` (every device gets all keys), `ring`
            (keys go round), `ulysses` (tokens are swapped for heads), `hybrid` (Ulysses in groups, a ring across
            them), or `auto`, which takes the largest Ulysses degree that the heads allow.
        ulysses: devices in a Ulysses group of `hybrid`; None takes the inner mesh axis, or what the heads allow.
    """

    kernel: AttentionKernel = "dot_product"
    flash_min_seq_length: int = 4096
    block_sizes: BlockSizes | None = None
    context: ContextAttention = "auto"
    ulysses: int | None = None

    def __post_init__(self) -> None:
        _one_of(self.kernel, AttentionKernel, "attention_kernel")
        _one_of(self.context, ContextAttention, "context_attention")
        least = self.flash_min_seq_length
        if isinstance(least, bool) or not isinstance(least, Integral) or least < 0:
            raise UsageError(f"flash_min_seq_length={self.flash_min_seq_length}: write 0 or more tokens")
        if self.ulysses is None:
            return
        if isinstance(self.ulysses, bool) or not isinstance(self.ulysses, Integral) or self.ulysses < 1:
            raise UsageError(f"ulysses_degree={self.ulysses!r}: write a number of devices, 1 or more, or leave it out")
        if self.context != "hybrid":
            raise UsageError(
                f"ulysses_degree={self.ulysses} is of no use with context_attention={self.context!r}: "
                "write context_attention='hybrid', or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class RematSpec:
    """What the backward pass recomputes instead of keeping.

    Attributes:
        policy: `none` keeps every activation, `minimal` keeps matrix products and recomputes the rest, `full` keeps
            only the inputs of each block, `offload` keeps these in the memory of the host.
        save: activations that are kept as well, where the policy keeps its own (`docs/parallelism.md` has the table of
            names); a tuple, or names with commas between them.
    """

    policy: RematPolicy = "none"
    save: tuple[RematName, ...] = ()

    def __post_init__(self) -> None:
        _one_of(self.policy, RematPolicy, "remat_policy")
        save = self.save
        if isinstance(save, str):
            save = names_in(save)
        if not (isinstance(save, tuple) and all(isinstance(name, str) for name in save)):
            raise UsageError(f"remat_save={save!r}: write names, such as ('attention', 'hidden')")
        for name in save:
            _one_of(name, RematName, "remat_save")
        if save and self.policy == "none":
            raise UsageError(
                f"remat_save={','.join(save)} is of no use with remat_policy='none', which keeps everything: write "
                "remat_policy='full', or leave remat_save out"
            )
        # One value for one meaning: a spec is part of jit's cache key.
        object.__setattr__(self, "save", tuple(name for name in get_args(RematName) if name in save))


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How stacked blocks run where a mesh axis holds their stages.

    Attributes:
        schedule: `gpipe` (each stage has neighbouring layers) or `circular` (each stage has several runs of layers,
            and microbatches go round: a smaller bubble for more moves).
        microbatches: parts of the batch; None chooses.
        repeats: rounds of the circular schedule; None for as many as leave a stage one layer a round.
        patches: parts of the image sequence in patch pipelining, which samples approximately; None for none of it.
        warmup_steps: exact steps before it; None for one.

    Raises:
        UsageError: a value that cannot work, or is of no use.
    """

    schedule: PipelineSchedule = "gpipe"
    microbatches: int | None = None
    repeats: int | None = None
    patches: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        _one_of(self.schedule, PipelineSchedule, "pipeline_schedule")
        for name, value in (
            ("pipeline_microbatches", self.microbatches),
            ("pipeline_repeats", self.repeats),
            ("pipeline_patches", self.patches),
            ("pipeline_warmup_steps", self.warmup_steps),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise UsageError(f"{name}={value!r}: write a whole number, 1 or more, or leave it out")
        if self.schedule == "gpipe" and (self.repeats or 1) > 1:
            raise UsageError(
                f'pipeline_repeats={self.repeats}: only pipeline_schedule="circular" repeats; write it, or leave '
                "pipeline_repeats out"
            )
        if self.patches and self.schedule != "gpipe":
            raise UsageError(
                f'pipeline_patches={self.patches} with pipeline_schedule="{self.schedule}": patches flow through '
                'stages of neighbouring layers, write pipeline_schedule="gpipe", or leave pipeline_patches out'
            )
        if self.warmup_steps and not self.patches:
            raise UsageError(
                f"pipeline_warmup_steps={self.warmup_steps} is of no use without pipeline_patches: write "
                "pipeline_patches=8, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Which products of a model are computed with quantised operands, and how.

    Calibrations are Qwix's symmetric ones: `absmax`, `absmax,F` (F times the largest magnitude), `rms,F` (F times the
    root mean square) or `fixed,X` (from -X to X). What lies beyond is clipped.

    Attributes:
        mode: `int8`, `fp8` (float8 e4m3), `fp8_full` (and gradients in float8 e5m2, not the model's dtype), `int4`
            (kernels alone, each read back as numbers of the model's dtype), or None.
        weights: calibration of kernels, one scale an output channel.
        activations: calibration of what kernels are multiplied with, one scale a token or feature map.
        gradients: calibration of incoming gradients, where they are quantised.
        modules: regular expression that the path of a layer matches as a whole, its parts joined by `/`.
        exclude: further such expressions, of layers that are left as they are.

    Raises:
        UsageError: a value that cannot work, or is of no use.
    """

    mode: QuantMode | None = None
    weights: str = "absmax"
    activations: str = "absmax"
    gradients: str = "absmax"
    modules: str = ".*"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode is not None:
            _one_of(self.mode, QuantMode, "quantization")
        for key, keyword in QUANT_KEYWORDS.items():
            value, usual = getattr(self, key), getattr(QuantSpec, key)
            if self.mode is None and value != usual:
                raise UsageError(f'{keyword}={value!r} is of no use without quantization: write quantization="int8"')
        if self.mode not in (None, "fp8_full") and self.gradients != "absmax":
            raise UsageError(
                f"{QUANT_KEYWORDS['gradients']}={self.gradients!r} is of no use with quantization={self.mode!r}, which "
                'leaves gradients as they are: write quantization="fp8_full", or leave it out'
            )
        for key in ("weights", "activations", "gradients"):
            _calibration(getattr(self, key), QUANT_KEYWORDS[key])
        if self.mode == "int4" and self.activations != "absmax":
            raise UsageError(
                f"{QUANT_KEYWORDS['activations']}={self.activations!r} is of no use with quantization='int4', which "
                "rounds kernels alone: leave it out"
            )
        if self.gradients.startswith("fixed"):
            raise UsageError(
                f"{QUANT_KEYWORDS['gradients']}={self.gradients!r}: gradients have no fixed size: write absmax or rms,7"
            )
        for key, patterns in (("modules", (self.modules,)), ("exclude", self.exclude)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, TypeError) as error:
                    raise UsageError(f"{QUANT_KEYWORDS[key]}={pattern!r} is no regular expression: {error}") from None

    def of(self, path: str) -> QuantSpec | None:
        """This value if the layer at `path` (its parts joined by `/`) multiplies quantised operands, else None."""
        return self if self.mode not in (None, "int4") and not self.why_not(path) else None

    def rounds(self, path: str) -> bool:
        """Whether the layer at `path` multiplies with its kernel rounded, and with nothing else quantised."""
        return self.mode == "int4" and not self.why_not(path)

    def stored_as(self, path: str) -> tuple[StoredAs, str]:
        """How the kernel of the layer at `path` is stored quantised, and the calibration of its scales.

        A layer that is left out multiplies numbers of the model's dtype; its kernel is stored in int8 all the same.
        """
        assert self.mode is not None
        if self.why_not(path):
            return "int8", "absmax"
        return STORED_AS[self.mode], self.weights

    def why_not(self, path: str) -> str:
        """Which expression keeps the layer at `path` as it is; empty where none does."""
        if not re.fullmatch(self.modules, path):
            return f"not in {self.modules!r}"
        return next((f"excluded by {pattern!r}" for pattern in self.exclude if re.fullmatch(pattern, path)), "")


QUANT_KEYWORDS = MappingProxyType(
    {
        "weights": "weight_quantization_calibration_method",
        "activations": "act_quantization_calibration_method",
        "gradients": "bwd_quantization_calibration_method",
        "modules": "qwix_module_path",
        "exclude": "quantization_exclude",
    }
)
"""The keyword of a model, and key of a recipe, for each field of `QuantSpec` but its mode."""

QUANT_FIELDS = ("quantization", "use_qwix_quantization", *QUANT_KEYWORDS.values())
"""All keywords of a model, and keys of a recipe, that say how it is quantised."""


QWIX_WITHOUT_MODE = 'use_qwix_quantization=True says too little: write quantization="int8", "fp8" or "fp8_full"'


def _calibration(value: str, keyword: str) -> None:
    """Refuses what is no symmetric calibration."""
    method, comma, number = str(value).partition(",")
    wants = {"absmax": False, "rms": True, "fixed": True}
    usual = f"write absmax, absmax,0.9, rms,7 or fixed,10 for {keyword}"
    if method not in wants:
        raise UsageError(f"{keyword}={value!r} is unknown: {usual}")
    try:
        valid = 1e-6 <= float(number) <= 1e6 if comma else not wants[method]
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{keyword}={value!r} needs one number from 1e-6 to 1e6 behind the comma: {usual}")
