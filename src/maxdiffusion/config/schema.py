"""What a recipe may say: frozen sections, each value with what is allowed; no jax here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from maxdiffusion.common_types import BlockSizes, LogicalAxisRules
from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.specs import (
    MESH_AXES,
    QWIX_WITHOUT_MODE,
    AttentionKernel,
    AttentionSpec,
    ContextAttention,
    MeshSpec,
    PipelineSchedule,
    PipelineSpec,
    Precision,
    QuantMode,
    QuantSpec,
    RematPolicy,
    RematSpec,
    names_in,
)

ModelName = Literal["pictures", "sd15", "sd21", "sdxl", "flux-dev", "flux-schnell"]
RulePreset = Literal["dp", "fsdp", "tp", "fsdp_tp", "hsdp", "context"]
DType = Literal["float32", "bfloat16", "float16"]
ResumeChange = Literal["cast", "start_ema", "drop_ema", "data"]
DataSource = Literal["pictures", "folder", "webdataset", "arrow", "parquet", "array_record"]
SolverName = Literal["euler", "euler_ancestral", "ddim", "dpmpp_2m"]

LIST = "a list such as [a, b]"
Text: TypeAlias = Annotated[str, Field(min_length=1, description="a text")]
Texts: TypeAlias = Annotated[tuple[str, ...], Field(description=LIST)]
ResumeChanges: TypeAlias = Annotated[
    tuple[ResumeChange, ...], Field(description="a list of cast, start_ema, drop_ema, data")
]
Names: TypeAlias = Annotated[tuple[str, ...], Field(description="names, such as [attention, hidden]")]
Flag: TypeAlias = Annotated[bool, Field(strict=True, description="true or false")]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=1, description="a whole number, 1 or more")]
CountOrZero: TypeAlias = Annotated[int, Field(strict=True, ge=0, description="a whole number, 0 or more")]
# JAX's keys keep 32 bits of a seed: a larger one would be that of another run.
LARGEST_SEED = 2**32 - 1
Seed: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=LARGEST_SEED, description=f"a whole number from 0 to {LARGEST_SEED}")
]
Every: TypeAlias = Annotated[int, Field(strict=True, ge=0, description="a whole number of steps, or 0 for never")]
Number: TypeAlias = Annotated[float, Field(strict=True, description="a number")]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0, description="a number above 0")]
NotNegative: TypeAlias = Annotated[float, Field(strict=True, ge=0, description="a number, 0 or more")]
Share: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=1, description="a number from 0 to 1")]
Decay: TypeAlias = Annotated[float, Field(strict=True, ge=0, lt=1, description="a number from 0 to below 1")]
MeshSizes: TypeAlias = Annotated[
    dict[str, Annotated[int, Field(strict=True)] | dict[str, Annotated[int, Field(strict=True)]]],
    Field(description="sizes of mesh axes such as data=4,tensor=2"),
]
DataSharding: TypeAlias = Annotated[
    tuple[str | tuple[str, ...] | None, ...],
    Field(description="one mesh axis or null for each dimension, such as [data, null, null, null]"),
]
Rules: TypeAlias = Annotated[
    RulePreset | tuple[tuple[str, str | tuple[str, ...] | None], ...],
    Field(description="a preset (dp, fsdp, tp, fsdp_tp, hsdp, context), or a list of [name, mesh axes]"),
]


class FieldError(UsageError):
    """A value that does not go with another value of its section.

    Attributes:
        key: name of the value within its section.
        cause: what is wrong and what to write.
    """

    def __init__(self, key: str, cause: str) -> None:
        super().__init__(f"{key}: {cause}")
        self.key = key
        self.cause = cause


class IdleError(FieldError):
    """A value that would do nothing beside the others of its section; left out, everything is the same."""


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataSection:
    """Which captioned pictures a model learns from.

    Attributes:
        source: `pictures` is the built-in set, `folder` a folder of images with captions; `webdataset` (tar shards),
            `arrow`, `parquet` and `array_record` are files of many pictures.
        path: the folder, file, pattern such as `train-{000..012}.tar`, or a list of them; not for the built-in set.
        image_field: column of the pictures, in `arrow` and `parquet`.
        caption_field: column of the captions in `arrow` and `parquet`, or field of the `.json` in `webdataset`.
        concepts: name of a list (`demo-160`), or the concepts themselves; null for all. Built-in set only.
        styles: styles of the built-in set; null for all.
        size: height and width that pictures are given to the model in, in pixels.
        split: `train` leaves the held-out (concept, style) pairs out, `held_out` is only they, `all` is both.
        on_broken: what a picture that cannot be read does: `skip` (named and counted) or `error`.
        index_folder: where the indices of files are kept; null for `.maxdiffusion` beside them.
        num_threads: threads that read files, ahead of the steps; null is 4, and 0 for the built-in set.
        buckets: null gives every picture as a square; `aspect` keeps about its ratio, at about `size * size` pixels;
            or a list of sizes, each written as height x width: `[64x64, 48x80]`.
        bucket_step: heights and widths of `aspect` are multiples of it, in pixels.
        max_buckets: sizes that `aspect` may use, each of which is a training program of its own.
    """

    source: DataSource = "pictures"
    path: Annotated[str | tuple[str, ...], Field(description="a path, or a list of paths")] | None = None
    image_field: Text = "image"
    caption_field: Text = "text"
    concepts: Annotated[str | tuple[str, ...], Field(description="the name of a list, or a list [a, b]")] | None = None
    styles: Texts | None = None
    size: Count = 64
    split: Literal["train", "held_out", "all"] = "train"
    on_broken: Literal["skip", "error"] = "error"
    index_folder: Text | None = None
    num_threads: CountOrZero | None = None
    buckets: (
        Annotated[
            Literal["aspect"] | tuple[str, ...], Field(description="aspect, or a list of sizes such as [64x64, 48x80]")
        ]
        | None
    ) = None
    bucket_step: Count = 16
    max_buckets: Count = 8

    def __post_init__(self) -> None:
        if self.source != "pictures" and not self.path:
            raise FieldError("path", f"source={self.source} needs the folder: write data.path=FOLDER")
        if self.source == "folder" and not isinstance(self.path, str):
            raise FieldError("path", "source=folder takes one folder: write data.path=FOLDER")
        if self.source == "pictures" and self.path is not None:
            raise FieldError("path", "the built-in pictures have no path: write data.source=folder, or leave path out")
        if self.buckets is not None and self.source == "pictures":
            raise FieldError("buckets", "the built-in pictures are all square: leave data.buckets out")
        if self.buckets == "aspect" and self.size % self.bucket_step:
            lower = self.size // self.bucket_step * self.bucket_step
            raise FieldError(
                "bucket_step",
                f"{self.bucket_step} does not divide data.size={self.size}: take data.size={lower or self.bucket_step} "
                "or another step",
            )
        _ = self.bucket_sizes
        self._refuse_what_has_no_use()

    def _refuse_what_has_no_use(self) -> None:
        """Values other than the defaults, which recipes of runs hold as well, must do something."""
        if self.source != "pictures":
            for key, default in (("concepts", "null"), ("styles", "null"), ("split", "train")):
                if getattr(self, key) != getattr(type(self), key):
                    cause = f"source={self.source} has no use for it: write data.{key}={default}, or leave it out"
                    raise IdleError(key, cause)
        if self.buckets != "aspect":
            for key in ("bucket_step", "max_buckets"):
                default = getattr(type(self), key)
                if getattr(self, key) != default:
                    has = "a list of buckets" if self.buckets else "buckets=null"
                    raise IdleError(key, f"{has} has no use for it: leave it out, or take data.buckets=aspect")

    @property
    def bucket_sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each size that `buckets` lists."""
        found: list[tuple[int, int]] = []
        for text in self.buckets if isinstance(self.buckets, tuple) else ():
            match = re.fullmatch(r"\s*([1-9]\d*)\s*x\s*([1-9]\d*)\s*", text)
            if match is None:
                raise FieldError("buckets", f"'{text}' is no size: write height x width in pixels, as in 48x80")
            found.append((int(match[1]), int(match[2])))
        if isinstance(self.buckets, tuple) and not found:
            raise FieldError("buckets", "the list is empty: name sizes, or write data.buckets=null for squares")
        return tuple(found)


_TIME_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "logit_mean": ("logit_normal",),
    "logit_std": ("logit_normal",),
    "timestep_bias_multiplier": ("earlier", "later", "range"),
    "timestep_bias_portion": ("earlier", "later"),
    "timestep_bias_begin": ("range",),
    "timestep_bias_end": ("range",),
}
"""The time samplers that have a use for each setting."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DiffusionSection:
    """Which noising process is learnt, and what the network predicts.

    Attributes:
        process: `flow` (straight lines between data and noise) or `vp` (variance preserving).
        prediction: what the network's output means.
        timesteps: how training draws times (`docs/training.md` has the list).
        logit_mean: of `logit_normal`; positive moves towards noise. Null is 0.
        logit_std: of `logit_normal`; null is 1.
        timestep_bias_multiplier: how much likelier `earlier`, `later` and `range` make their part; null is 2.
        timestep_bias_portion: that part of `earlier` and `later`, as a share of all times; null is 0.25.
        timestep_bias_begin: first time of `range`, as a share of all times; null is 0.25.
        timestep_bias_end: end of `range`, as a share of all times; null is 0.75.
        shift: moves times towards noise; 1 moves nothing.
        zero_terminal_snr: `vp` only: the last time holds no signal at all.
    """

    process: Literal["flow", "vp"] = "flow"
    prediction: Literal["velocity", "epsilon", "v_prediction", "sample"] = "velocity"
    timesteps: Literal["uniform", "stratified", "logit_normal", "cosine", "earlier", "later", "range"] = "uniform"
    logit_mean: Number | None = None
    logit_std: Positive | None = None
    timestep_bias_multiplier: Positive | None = None
    timestep_bias_portion: Share | None = None
    timestep_bias_begin: Share | None = None
    timestep_bias_end: Share | None = None
    shift: Positive = 1.0
    zero_terminal_snr: Flag = False

    def __post_init__(self) -> None:
        for key, samplers in _TIME_SETTINGS.items():
            if getattr(self, key) is not None and self.timesteps not in samplers:
                takes = " or ".join(f"diffusion.timesteps={name}" for name in samplers)
                raise IdleError(key, f"timesteps={self.timesteps} has no use for it: leave it out, or take {takes}")
        if self.zero_terminal_snr and self.process == "flow":
            cause = "process=flow ends without signal already: leave it out, or take diffusion.process=vp"
            raise IdleError("zero_terminal_snr", cause)
        if self.zero_terminal_snr and self.prediction == "epsilon":
            cause = "epsilon says nothing where there is no signal: take diffusion.prediction=v_prediction"
            raise FieldError("zero_terminal_snr", cause)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainSection:
    """How long and how fast a model learns.

    Attributes:
        steps: optimizer steps.
        start_from: trained weights and their words to begin with: `RUN`, `RUN@STEP`, a packed model's folder, or a
            packaged model's name; null draws weights from the seed.
        batch_size: pictures a step, over all devices.
        accumulation_steps: parts that a step's pictures are worked off in, one after the other; the same numbers with
            the activations of one part in memory.
        optimizer: `adamw`, `adafactor` (small state), `lion`, or `muon` (hidden matrices; AdamW for the rest).
        learning_rate: its highest value.
        warmup_steps: steps of linear rise to it.
        schedule: what follows the rise: `constant`, or `cosine` down to zero at the last step.
        decay_steps: steps of the fall of `cosine`, at the end; null for all that follow the rise.
        weight_decay: of kernels, a step and unit of learning rate.
        beta1: decay of the first moment; null is 0.9, with Muon 0.95, with Adafactor none, which then keeps none.
        beta2: decay of the second moment (of Lion's only one); null is 0.99. Adafactor has its own schedule.
        grad_clip: largest global norm of the gradients; null for no limit.
        master_dtype: dtype that the trained weights are kept in; moments and averaged weights are float32.
        rounding: of bfloat16 weights after a step: `stochastic` keeps small steps in the mean, `nearest` loses them;
            null is `stochastic`.
        ema_decay: decay of the averaged weights a step; 0 keeps none.
        caption_dropout: share of pictures trained without their caption, for guidance.
        log_every: steps between lines of metrics.
        sample_every: steps between grids of samples.
        checkpoint_every: steps between checkpoints; the last step always makes one.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_every: checkpoints of steps that are multiples of this stay too; 0 for none.
        resume_changes: what a resumed run may change: `cast` dtypes, `start_ema`, `drop_ema`, `data`.
        eval_every: steps between losses on the held-out pairs.
        eval_pictures: pictures painted then for each held-out pair of the gallery; 0 measures losses alone.
        watchdog_seconds: that a step may take before it is said who is late; null for any.
    """

    steps: Count = 1000
    start_from: Text | None = None
    batch_size: Count = 32
    accumulation_steps: Count = 1
    optimizer: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: Positive = 3e-4
    warmup_steps: CountOrZero = 100
    schedule: Literal["constant", "cosine"] = "constant"
    decay_steps: Count | None = None
    weight_decay: NotNegative = 0.01
    beta1: Decay | None = None
    beta2: Decay | None = None
    grad_clip: Positive | None = 1.0
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    rounding: Literal["stochastic", "nearest"] | None = None
    ema_decay: Decay = 0.999
    caption_dropout: Share = 0.1
    log_every: Count = 10
    sample_every: Every = 500
    checkpoint_every: Every = 1000
    keep_checkpoints: Count = 3
    keep_every: Every = 0
    resume_changes: ResumeChanges = ()
    eval_every: Every = 0
    eval_pictures: Every = 1
    watchdog_seconds: Positive | None = 600.0

    def __post_init__(self) -> None:
        if self.optimizer == "adafactor" and self.beta2 is not None:
            cause = "adafactor averages second moments by 1 - step^-0.8: leave it out, or take train.optimizer=adamw"
            raise IdleError("beta2", cause)
        if self.decay_steps is not None and self.schedule != "cosine":
            raise IdleError("decay_steps", "only train.schedule=cosine falls: write it, or leave decay_steps out")
        if self.decay_steps is not None and self.decay_steps > self.steps:
            raise FieldError(
                "decay_steps", f"a run of {self.steps} steps has no {self.decay_steps} to fall in: write less"
            )
        if self.rounding is not None and self.master_dtype == "float32":
            cause = "float32 weights are not rounded: leave it out, or take train.master_dtype=bfloat16"
            raise IdleError("rounding", cause)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SampleSection:
    """How pictures are made from noise, while training and afterwards.

    Attributes:
        solver: integrates from noise to picture.
        steps: its steps.
        guidance_scale: classifier-free guidance; 1 is none.
        precise_first_steps: of a model with quantised products, so many steps without them.
        precise_last_steps: the same at the end.
        prompts: captions of the sample grids.
        seed: seed of the samples' noise.
        num_per_prompt: pictures for each prompt.
    """

    solver: SolverName = "euler"
    steps: Count = 25
    guidance_scale: NotNegative = 3.0
    precise_first_steps: CountOrZero = 0
    precise_last_steps: CountOrZero = 0
    prompts: Texts = ()
    seed: Seed = 0
    num_per_prompt: Count = 4


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrackSection:
    """Who is told what a run measures, beside `metrics.jsonl` and `report.html`, which every run has.

    Attributes:
        tensorboard: writes TensorBoard's files into the run's folder (extra `track`).
        wandb: project at Weights & Biases (package wandb); null for none.
        wandb_mode: `online`, or `offline` for files in the run's folder; null leaves it to the environment.
        peak_tflops: of one device, which MFU is measured by; null takes that of known accelerators.
    """

    tensorboard: Flag = False
    wandb: Text | None = None
    wandb_mode: Literal["online", "offline"] | None = None
    peak_tflops: Positive | None = None

    def __post_init__(self) -> None:
        if self.wandb_mode is not None and self.wandb is None:
            raise IdleError("wandb_mode", "there is no project: write track.wandb=PROJECT, or leave it out")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ProfileSection:
    """Which steps a profiler traces.

    Attributes:
        steps: `10:13` begins when 10 steps are done and ends when 13 are: three steps; null traces none.
    """

    steps: Annotated[str, Field(description="two numbers of steps, as in 10:13")] | None = None

    def __post_init__(self) -> None:
        _ = self.span

    @property
    def span(self) -> tuple[int, int] | None:
        """Steps done when the trace begins, and when it ends."""
        if self.steps is None:
            return None
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", self.steps)
        if match is None:
            raise FieldError("steps", f"'{self.steps}' is no range: write where it begins and ends, as in 10:13")
        begin, end = int(match[1]), int(match[2])
        if begin >= end:
            raise FieldError("steps", f"{begin}:{end} holds no step: write for example {begin}:{begin + 3}")
        return begin, end


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Recipe:
    """One training run, whole: what to learn, from what, how, and where on the devices.

    Attributes:
        model: registry name.
        model_config: overrides of the model's own constructor keywords; the model checks them.
        seed: seed of the initial weights, the order of the data and the noise.
        run: output folder; null is `runs/NAME` with the name of the recipe.
        resume: go on from the newest checkpoint of the output folder; false refuses a folder that has one.
        mesh_axes: names of the mesh axes, outermost first.
        mesh: size of each axis, and under `dcn` across slices; as text `data=4,tensor=2`.
        logical_axis_rules: a preset, a list of [logical name, mesh axes], or null for the default table.
        data_sharding: mesh axis of each dimension of a batch; null follows the rules.
        attention_kernel: `dot_product` or `flash`.
        flash_min_seq_length: tokens below which `flash` uses the dot-product kernel.
        flash_block_sizes: tiles of the flash kernel; null lets the kernel choose.
        context_attention: how a sequence cut over mesh axes is read: `auto`, `ring`, `ulysses`, `hybrid`, `gather`.
        ulysses_degree: devices in a Ulysses group of `hybrid`; null lets the heads decide.
        dtype: dtype of activations.
        weights_dtype: dtype that the model's weights are used in (the optimizer's are float32).
        precision: precision of float32 matrix products.
        remat_policy: what the backward pass recomputes: `none`, `minimal`, `full`, or `offload`.
        remat_save: activations that are kept as well, such as [attention, hidden].
        scan_layers: equal blocks are stacked and scanned, or pipelined where the mesh has stages.
        pipeline_schedule: `gpipe` or `circular`.
        pipeline_microbatches: parts of the batch that flow through the stages; null chooses.
        pipeline_repeats: rounds of the circular schedule; null chooses.
        pipeline_patches: parts of the image sequence in patch pipelining, an approximation for sampling; null for none.
        pipeline_warmup_steps: exact steps before it; null for one.
        use_qwix_quantization: says that `quantization` is meant.
        quantization: `int8`, `fp8` or `fp8_full`: products of quantised operands; `int4`: kernels of 4 bits; null for
            none.
        weight_quantization_calibration_method: of kernels: `absmax`, `absmax,0.9`, `rms,7` or `fixed,10`.
        act_quantization_calibration_method: of what they are multiplied with.
        bwd_quantization_calibration_method: of gradients, with `fp8_full`.
        qwix_module_path: regular expression of the paths of the layers that are quantised.
        quantization_exclude: expressions of layers that are not; null for the model's own.
        strict: every array that is not laid out as the rules wish is an error.
        virtual_devices: number of virtual devices on a CPU, made by the command line; null takes what there is.
    """

    model: ModelName = "pictures"
    model_config: dict[str, Any] = field(default_factory=dict)
    seed: Seed = 0
    run: Text | None = None
    resume: Flag = False
    mesh_axes: Annotated[tuple[Text, ...], Field(min_length=1, description="a list of different names")] = MESH_AXES
    mesh: MeshSizes = field(default_factory=dict)
    logical_axis_rules: Rules | None = None
    data_sharding: DataSharding | None = None
    attention_kernel: AttentionKernel = "dot_product"
    flash_min_seq_length: CountOrZero = AttentionSpec.flash_min_seq_length
    flash_block_sizes: BlockSizes | None = None
    context_attention: ContextAttention = "auto"
    ulysses_degree: Count | None = None
    dtype: DType = "float32"
    weights_dtype: DType = "float32"
    precision: Precision = "default"
    remat_policy: RematPolicy = "none"
    remat_save: Names = ()
    scan_layers: Flag = False
    pipeline_schedule: PipelineSchedule = "gpipe"
    pipeline_microbatches: Count | None = None
    pipeline_repeats: Count | None = None
    pipeline_patches: Count | None = None
    pipeline_warmup_steps: Count | None = None
    use_qwix_quantization: Flag = False
    quantization: QuantMode | None = None
    weight_quantization_calibration_method: Text = QuantSpec.weights
    act_quantization_calibration_method: Text = QuantSpec.activations
    bwd_quantization_calibration_method: Text = QuantSpec.gradients
    qwix_module_path: Text = QuantSpec.modules
    quantization_exclude: tuple[Text, ...] | None = None
    strict: Flag = False
    virtual_devices: Count | None = None
    data: DataSection = field(default_factory=DataSection)
    diffusion: DiffusionSection = field(default_factory=DiffusionSection)
    train: TrainSection = field(default_factory=TrainSection)
    sample: SampleSection = field(default_factory=SampleSection)
    track: TrackSection = field(default_factory=TrackSection)
    profile: ProfileSection = field(default_factory=ProfileSection)

    def __post_init__(self) -> None:
        axes = self.mesh_axes
        twice = next((name for name in axes if axes.count(name) > 1), None)
        if twice:
            raise FieldError("mesh_axes", f"'{twice}' is given twice: mesh axes need different names")
        try:
            _mesh_spec(self.mesh, axes)
        except UsageError as error:
            raise FieldError("mesh", str(error)) from error
        try:
            _ = self.pipeline_spec
        except UsageError as error:
            at_fault = str(error).partition("=")[0]
            raise FieldError(at_fault, str(error)) from error
        try:
            _ = self.attention_spec
        except UsageError as error:
            raise FieldError("ulysses_degree", str(error)) from error
        try:
            _ = self.quant_spec
        except UsageError as error:
            raise FieldError(str(error).partition("=")[0].partition(":")[0], str(error)) from error
        try:
            _ = self.remat_spec
        except UsageError as error:
            raise FieldError("remat_save", str(error)) from error
        for entry in self.data_sharding or ():
            for name in (entry,) if isinstance(entry, str) else entry or ():
                if name not in axes:
                    raise FieldError("data_sharding", f"the mesh has no axis '{name}': {nearest(name, axes)}")

    @field_validator("mesh", mode="before")
    @classmethod
    def _read_mesh(cls, mesh: Any) -> Any:
        return mesh_sizes(mesh) if isinstance(mesh, str) else mesh

    @field_validator("remat_save", mode="before")
    @classmethod
    def _read_names(cls, names: Any) -> Any:
        return names_in(names) if isinstance(names, str) else names

    @field_validator("logical_axis_rules", mode="before")
    @classmethod
    def _known_preset(cls, rules: Any) -> Any:
        presets = get_args(RulePreset)
        if isinstance(rules, str) and rules not in presets:
            raise UsageError(f"'{rules}' is no preset: {nearest(rules, presets)}")
        return rules

    @field_validator("flash_block_sizes", mode="before")
    @classmethod
    def _read_blocks(cls, blocks: Any) -> Any:
        if not isinstance(blocks, dict):
            return blocks
        names = [entry.name for entry in dataclasses.fields(BlockSizes)]
        unknown = next((name for name in blocks if name not in names), None)
        if unknown is not None:
            raise UsageError(f"'{unknown}' is unknown: {nearest(str(unknown), names)}")
        missing = [name for name in ("block_q", "block_k") if name not in blocks]
        if missing:
            raise UsageError(f"{' and '.join(missing)} missing: write flash_block_sizes.{missing[0]}=128")
        return BlockSizes(**blocks)

    @property
    def mesh_spec(self) -> MeshSpec:
        """Sizes of the mesh axes."""
        return _mesh_spec(self.mesh, self.mesh_axes)

    @property
    def rules(self) -> str | LogicalAxisRules | None:
        """The preset, the list of rules, or None for the default table."""
        return self.logical_axis_rules

    @property
    def attention_spec(self) -> AttentionSpec:
        """Kernel and tiles of attention."""
        return AttentionSpec(
            kernel=self.attention_kernel,
            flash_min_seq_length=self.flash_min_seq_length,
            block_sizes=self.flash_block_sizes,
            context=self.context_attention,
            ulysses=self.ulysses_degree,
        )

    @property
    def remat_spec(self) -> RematSpec:
        """What the backward pass recomputes."""
        return RematSpec(policy=self.remat_policy, save=self.remat_save)  # pyright: ignore[reportArgumentType]

    @property
    def quant_spec(self) -> QuantSpec:
        """What is quantised, but for what the model excludes by itself."""
        if self.use_qwix_quantization and not self.quantization:
            raise UsageError(QWIX_WITHOUT_MODE)
        return QuantSpec(
            mode=self.quantization,
            weights=self.weight_quantization_calibration_method,
            activations=self.act_quantization_calibration_method,
            gradients=self.bwd_quantization_calibration_method,
            modules=self.qwix_module_path,
            exclude=self.quantization_exclude or (),
        )

    @property
    def pipeline_spec(self) -> PipelineSpec:
        """Schedule of stacked blocks over the stages."""
        return PipelineSpec(
            schedule=self.pipeline_schedule,
            microbatches=self.pipeline_microbatches,
            repeats=self.pipeline_repeats,
            patches=self.pipeline_patches,
            warmup_steps=self.pipeline_warmup_steps,
        )


SECTIONS: Mapping[str, type] = {
    "data": DataSection,
    "diffusion": DiffusionSection,
    "train": TrainSection,
    "sample": SampleSection,
    "track": TrackSection,
    "profile": ProfileSection,
}
"""Keys of a recipe that hold keys themselves."""

MAPPINGS = ("mesh", "model_config", "flash_block_sizes")
"""Keys of a recipe that hold a mapping: written whole, or name by name as `mesh.data=4`."""


def mesh_sizes(text: str) -> dict[str, Any]:
    """The mapping that a mesh written as `data=4,tensor=2,dcn.data=2` stands for; any axis names.

    Raises:
        MeshError: the text is not of that form.
    """
    written = [part.partition("=")[0].strip() for part in text.split(",") if part.strip()]
    names = tuple(dict.fromkeys(name.removeprefix("dcn.") for name in written)) or MESH_AXES
    spec = MeshSpec.parse(text, axes=names)
    sizes: dict[str, Any] = {name: spec.ici[names.index(name)] for name in written if not name.startswith("dcn.")}
    dcn = {name[4:]: spec.dcn[names.index(name[4:])] for name in written if name.startswith("dcn.")}
    return {**sizes, "dcn": dcn} if dcn else sizes


def _mesh_spec(mesh: Mapping[str, Any], axes: tuple[str, ...]) -> MeshSpec:
    sizes = {name: size for name, size in mesh.items() if name != "dcn"}
    nested = next((name for name, size in sizes.items() if isinstance(size, dict)), None)
    if nested:
        raise UsageError(f"mesh.{nested} holds a mapping: write a number of devices")
    if isinstance(mesh.get("dcn", {}), int):
        raise UsageError("mesh.dcn holds the sizes across slices by axis: write for example mesh.dcn.data=2")
    # Names that are no names of axes are told by `parse`; as keywords they could be anything.
    text = [f"{name}={size}" for name, size in sizes.items()]
    text += [f"dcn.{name}={size}" for name, size in mesh.get("dcn", {}).items()]
    return MeshSpec.parse(",".join(text), axes=axes)


def key_annotations() -> Iterator[tuple[str, Any]]:
    """Every full key of a recipe with its annotation, in the order shown; a mapping is one key."""
    for name, annotation in get_type_hints(Recipe, include_extras=True).items():
        if name in SECTIONS:
            for inner, hint in get_type_hints(SECTIONS[name], include_extras=True).items():
                yield f"{name}.{inner}", hint
        else:
            yield name, annotation


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every full key of a recipe with its value; a mapping that is not empty gives a key for each of its names."""
    flat: dict[str, Any] = {}
    for key, _ in key_annotations():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(recipe, section) if section else recipe, name)
        if isinstance(value, BlockSizes):
            value = {block: size for block, size in dataclasses.asdict(value).items() if size is not None}
        if key not in MAPPINGS or not value:
            flat[key] = value
            continue
        for inner, size in value.items():
            if (key, inner) == ("mesh", "dcn"):
                flat.update({f"mesh.dcn.{axis}": slices for axis, slices in size.items()})
            else:
                flat[f"{key}.{inner}"] = size
    return flat
