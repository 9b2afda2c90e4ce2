"""`DiffusionModel`: the flat execution keywords that every model takes, folded once into a `Runtime`."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from maxdiffusion.common_types import BlockSizes, LogicalAxisRules
from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.kernels.stored import is_stored
from maxdiffusion.nn.parameters import initial_values, parameter_names
from maxdiffusion.nn.quantisation import QuantRow, Storage, checked, ledger, storages, storing
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.pipeline import say_idle, stage_axes
from maxdiffusion.parallel.report import path_name
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import QUANT_FIELDS, QWIX_WITHOUT_MODE, AttentionSpec, PipelineSpec, QuantSpec, RematSpec

F = TypeVar("F", bound=Callable[..., Any])

Tree: TypeAlias = Any
"""A nested dict; what its leaves are is said where it is used."""

_PRECISIONS = {
    "default": jax.lax.Precision.DEFAULT,
    "high": jax.lax.Precision.HIGH,
    "highest": jax.lax.Precision.HIGHEST,
}


def float_dtype(value: Any, name: str) -> Any:
    """`value` (a dtype, a scalar type or a name such as 'bfloat16') as a floating dtype.

    Args:
        value: what the user wrote.
        name: of the keyword, for the message.

    Raises:
        UsageError: it is no floating dtype, or one that jax would make float32.
    """
    if value is None:
        raise UsageError(f"{name}=None is no dtype: write 'float32' or 'bfloat16'")
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise UsageError(f"{name}={value!r} is no dtype: write 'float32' or 'bfloat16'") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UsageError(f"{name}={dtype.name} is no floating dtype: write 'float32' or 'bfloat16'")
    if dtype.itemsize > jnp.result_type(float).itemsize:
        raise UsageError(f"{name}={dtype.name} would become float32: write 'float32', or set JAX_ENABLE_X64=1")
    return dtype


def _precision(value: str | jax.lax.Precision | None) -> jax.lax.Precision | None:
    if value is None or isinstance(value, jax.lax.Precision):
        return value
    if value not in _PRECISIONS:
        raise UsageError(f"precision={value!r} is unknown: {nearest(str(value), _PRECISIONS)}")
    return _PRECISIONS[value]


def at_border(method: F) -> F:
    """Makes a public method of a `DiffusionModel` take arrays of Explicit meshes and give the same kind back.

    Inside, everything lies on the Auto mesh of the model's layout; results have the kind of the first array.
    """

    @functools.wraps(method)
    def run(self: DiffusionModel, *args: Any, **keywords: Any) -> Any:
        layout = self.layout
        if layout.mesh is None:
            return method(self, *args, **keywords)
        arrays = [leaf for leaf in jax.tree.leaves((args, keywords)) if isinstance(leaf, jax.Array)]
        with layout.scope():
            entered = jax.tree.map(
                lambda leaf: layout.enter(leaf) if isinstance(leaf, jax.Array) else leaf, (args, keywords)
            )
            result = method(self, *entered[0], **entered[1])
        return jax.tree.map(lambda leaf: layout.leave(leaf, like=arrays[0]), result) if arrays else result

    return run  # type: ignore[return-value]


class DiffusionModel(nn.Module, kw_only=True):
    """Base of the models: how one runs, apart from what it is.

    Attributes:
        mesh: devices that the model runs on; None for one device. Needed for `attention_kernel="flash"`.
        attention_kernel: `dot_product` (scores in memory) or `flash` (online softmax, any length).
        flash_min_seq_length: below this many tokens `flash` uses the dot-product kernel, with the same numbers.
        flash_block_sizes: tiles of the flash kernel; None lets the kernel choose.
        context_attention: how a sequence that is cut over mesh axes is attended: `ring`, `ulysses`, `hybrid`, `gather`,
            or `auto`, which goes by the heads.
        ulysses_degree: devices in a Ulysses group of `hybrid`; None lets the heads decide.
        logical_axis_rules: pairs (logical axis, mesh axes), or the name of a preset; they come before the default
            table, which None uses alone.
        dtype: dtype of activations and products.
        weights_dtype: dtype that parameters are made and stored in.
        remat_policy: `none`, `minimal` (keep products with weights), `full` (keep only each block's inputs) or
            `offload` (keep these in the memory of the host).
        remat_save: activations that are kept as well: a tuple, or names with commas between them, of `qkv`,
            `attention`, `attention_output`, `hidden` and `feed_forward`.
        scan_layers: stack equal transformer blocks and scan over them, or pipeline them where the mesh has stages.
        pipeline_schedule: `gpipe` or `circular`.
        pipeline_microbatches: parts of the batch that flow through the stages; None chooses.
        pipeline_repeats: rounds of the circular schedule; None chooses.
        pipeline_patches: parts of the image sequence in patch pipelining, an approximation for sampling; None for none.
        pipeline_warmup_steps: exact steps before it; None for one.
        precision: of float32 products: `default`, `high`, `highest`, or None for the backend's own.
        strict: an array that is not laid out as the rules wish is an error, not a report.
        quantization: products with quantised operands: `int8`, `fp8` (forward), `fp8_full` (gradients too); `int4`,
            kernels rounded to 4 bits alone; or None.
        use_qwix_quantization: says that `quantization` is meant; on its own it says too little.
        weight_quantization_calibration_method: scales of kernels: `absmax`, `absmax,0.9`, `rms,7`, `fixed,10`.
        act_quantization_calibration_method: the same for what kernels are multiplied with.
        bwd_quantization_calibration_method: the same for gradients, with `fp8_full`.
        qwix_module_path: regular expression of the paths of the layers that are quantised.
        quantization_exclude: expressions of layers that are not; None for the model's own (`keeps_precision`).

    Raises:
        UsageError: at construction, for a value that cannot work.
    """

    takes_patches: ClassVar[bool] = False
    """Whether patch pipelining knows how to sample from this model."""

    keeps_precision: ClassVar[tuple[str, ...]] = ()
    """Regular expressions of the paths of layers that stay unquantised where the user names none."""

    modulations: ClassVar[tuple[str, ...]] = ()
    """Further ones, of layers that scale and shift others: left out where activations are quantised as well."""

    @classmethod
    def usually_excluded(cls, quantization: str | None) -> tuple[str, ...]:
        """What stays unquantised in a mode where the user names no layers."""
        if quantization is None:
            return ()
        return cls.keeps_precision if quantization == "int4" else (*cls.keeps_precision, *cls.modulations)

    mesh: Mesh | None = None
    attention_kernel: str = "dot_product"
    flash_min_seq_length: int = 4096
    flash_block_sizes: BlockSizes | None = None
    context_attention: str = "auto"
    ulysses_degree: int | None = None
    logical_axis_rules: LogicalAxisRules | str | None = None
    dtype: Any = jnp.float32
    weights_dtype: Any = jnp.float32
    remat_policy: str = "none"
    remat_save: Sequence[str] | str = ()
    scan_layers: bool = False
    pipeline_schedule: str = "gpipe"
    pipeline_microbatches: int | None = None
    pipeline_repeats: int | None = None
    pipeline_patches: int | None = None
    pipeline_warmup_steps: int | None = None
    precision: str | jax.lax.Precision | None = None
    strict: bool = False
    quantization: str | None = None
    use_qwix_quantization: bool = False
    weight_quantization_calibration_method: str = "absmax"
    act_quantization_calibration_method: str = "absmax"
    bwd_quantization_calibration_method: str = "absmax"
    qwix_module_path: str = ".*"
    quantization_exclude: Sequence[str] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """The model that a config describes, such as the dict of a `config.json`.

        Args:
            config: constructor keywords; those that begin with an underscore are the file's own notes.
            overrides: constructor keywords, of the model or of its execution, that come first.

        Raises:
            UsageError: an unknown keyword, with the nearest known one, or a value that cannot work.
        """
        known = keyword_names(cls)
        given = {name: value for name, value in {**config, **overrides}.items() if not name.startswith("_")}
        for name in given:
            if name not in known:
                raise UsageError(f"'{name}' is no keyword of {cls.__name__}: {nearest(name, known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name in keyword_names(type(self)):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        object.__setattr__(self, "_runtime", _fold(self))
        self.validate()
        for flag in fields(self):
            value = getattr(self, flag.name)
            if flag.type in ("bool", bool) and not isinstance(value, bool | np.bool_):
                raise UsageError(f"{flag.name}={value!r}: write True or False")
        super().__post_init__()

    def validate(self) -> None:
        """Checks what the model is, at construction.

        Raises:
            UsageError: the model's own keywords do not fit together.
        """

    @property
    def runtime(self) -> Runtime:
        """How the model runs: what every layer receives."""
        return object.__getattribute__(self, "_runtime")

    @property
    def layout(self) -> Layout:
        """Where every array lives."""
        return self.runtime.layout

    def dummy_inputs(self) -> dict[str, Tree]:
        """Keyword arguments of the smallest call that makes every parameter, as `jax.ShapeDtypeStruct`s."""
        raise NotImplementedError

    def usual_inputs(self, layout: Layout | None = None) -> dict[str, Tree]:
        """The same at the size that the model is made for, one example.

        Args:
            layout: pads what a layout of the model would pad within the call; None for the model's own.
        """
        raise NotImplementedError

    def call_shapes(self, batch: int, *, height: int, width: int, text: int) -> dict[str, Tree]:
        """Keyword arguments of a call of this size, as `jax.ShapeDtypeStruct`s.

        Args:
            batch: samples.
            height: of what is denoised (latents, or pixels of a model without an autoencoder).
            width: of the same.
            text: tokens of the text.
        """
        raise NotImplementedError

    def abstract_params(self) -> tuple[Tree, Tree]:
        """Shapes and logical names of the parameters; nothing is allocated and no device is needed.

        Returns:
            A tree of `jax.ShapeDtypeStruct` and one of the same form with a tuple of names for each parameter.
        """
        boxed = self._boxed()
        return nn.unbox(boxed), parameter_names(boxed)

    def init_weights(self, rng: Array) -> Tree:
        """Random parameters, already sharded on the mesh by the rules.

        Each device makes its own share and nothing else; the values depend on `rng` alone, not on the mesh.

        Args:
            rng: a key of `jax.random.key` or `jax.random.PRNGKey`.

        Returns:
            A plain tree of arrays in `weights_dtype`, for `model.apply({"params": params}, ...)`.
        """
        with self.layout.scope():
            return initial_values(self._boxed(), rng, self.layout)

    def quantized_shapes(self) -> Tree:
        """What `quantize_weights` gives: `jax.ShapeDtypeStruct`s with shardings, those of kernels in `Stored` pairs.

        Raises:
            UsageError: the model has no `quantization`.
        """
        shapes, names = self.abstract_params()
        shardings = self.layout.shardings(shapes, names)
        kernels = self.storages()

        def form(path: Any, leaf: Any, sharding: Any) -> Any:
            like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            storage = kernels.get(path_name(path))
            return like if storage is None else storage.form(like)

        return jax.tree_util.tree_map_with_path(form, shapes, shardings)

    def quantize_weights(self, params: Tree) -> Tree:
        """Parameters whose kernels are stored quantised, for `model.apply` as the others are; sharded by the rules.

        Kernels of layers that stay unquantised are stored in int8 and read back as numbers of `dtype`. One leaf comes
        after the other: beside both trees, no memory is needed.

        Args:
            params: from `init_weights` or trained, laid out anyhow.

        Raises:
            UsageError: the model has no `quantization`, or kernels are stored quantised already.
        """
        kernels = self.storages()
        if any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored))):
            raise UsageError("kernels of these parameters are stored quantised already: give those that they came from")
        shapes, names = self.abstract_params()

        def store(path: Any, leaf: Array, sharding: Any) -> Any:
            storage = kernels.get(path_name(path))
            return leaf if storage is None else storing(storage, leaf.shape, sharding)(leaf)

        with self.layout.scope():
            return jax.tree_util.tree_map_with_path(store, params, self.layout.shardings(shapes, names))

    def ledger(self) -> tuple[QuantRow, ...]:
        """What is quantised, how, what is not and why: a row for each layer that multiplies. No weights are made."""
        return ledger(self._boxed(), self.runtime.quant)

    def storages(self) -> dict[str, Storage]:
        """How each kernel is stored quantised, by its path joined by `/`.

        Raises:
            UsageError: the model has no `quantization`.
        """
        if self.runtime.quant.mode is None:
            raise UsageError('a model without quantization stores no weights quantised: write quantization="int8"')
        return storages(self._boxed(), self.runtime.quant)

    def alone(self) -> Self:
        """A copy that computes the same without mesh, kernel or rematerialisation: to ask for shapes, or count work."""
        return self.clone(
            parent=None,
            mesh=None,
            logical_axis_rules=None,
            attention_kernel="dot_product",
            remat_policy="none",
            remat_save=(),
        )

    def unquantized(self) -> Self:
        """A copy that multiplies no quantised operands; kernels that are stored quantised are read as numbers."""
        usual: dict[str, Any] = {field.name: field.default for field in fields(DiffusionModel)}
        return self.clone(parent=None, **{name: usual[name] for name in QUANT_FIELDS})

    def _boxed(self) -> Tree:
        """Boxed shapes; the dummy batch of one divides by no mesh."""
        single = self.alone()

        def init(inputs: Tree) -> Tree:
            return single.init(jax.random.key(0), **inputs)["params"]

        boxed = jax.eval_shape(init, self.dummy_inputs())
        quant = self.runtime.quant
        own, kind = self.usually_excluded(quant.mode), self.layout.device_kind
        checked(ledger(boxed, quant), quant, device_kind=kind, own=own)
        return boxed


def keyword_names(model: type[DiffusionModel]) -> tuple[str, ...]:
    """The constructor keywords of a model: its fields but for the two that every flax module has."""
    return tuple(field.name for field in fields(model) if field.name not in ("parent", "name"))


EXECUTION = keyword_names(DiffusionModel)
"""Keywords that say how a model runs; every model takes them."""


def _frozen(value: Any) -> Any:
    """Lists, and what can be gone through but once, as tuples, at any depth: a model is hashable, and is copied."""
    listed = isinstance(value, list | tuple | Iterator | ItemsView)
    return tuple(_frozen(item) for item in value) if listed else value


def _fold(model: DiffusionModel) -> Runtime:
    """The flat keywords as one value.

    Raises:
        UsageError: a keyword's value cannot work.
    """
    if model.use_qwix_quantization and not model.quantization:
        raise UsageError(QWIX_WITHOUT_MODE)
    if not isinstance(model.quantization_exclude, Sequence | None) or isinstance(model.quantization_exclude, str):
        one = model.quantization_exclude
        raise UsageError(f"quantization_exclude={one!r}: write a list of regular expressions, such as ['.*attn.*']")
    usual = type(model).usually_excluded(model.quantization)
    quant = QuantSpec(
        mode=model.quantization,  # pyright: ignore[reportArgumentType]  the spec checks the name
        weights=model.weight_quantization_calibration_method,
        activations=model.act_quantization_calibration_method,
        gradients=model.bwd_quantization_calibration_method,
        modules=model.qwix_module_path,
        exclude=usual if model.quantization_exclude is None else tuple(model.quantization_exclude),
    )
    if not (model.flash_block_sizes is None or isinstance(model.flash_block_sizes, BlockSizes)):
        raise UsageError(
            f"flash_block_sizes={model.flash_block_sizes!r}: write BlockSizes(block_q=128, block_k=128) "
            "from maxdiffusion.common_types, or leave it out"
        )
    attention = AttentionSpec(
        kernel=model.attention_kernel,  # pyright: ignore[reportArgumentType]  the spec checks the name
        flash_min_seq_length=model.flash_min_seq_length,
        block_sizes=model.flash_block_sizes,
        context=model.context_attention,  # pyright: ignore[reportArgumentType]  the spec checks the name
        ulysses=model.ulysses_degree,
    )
    if attention.kernel == "flash" and model.mesh is None:
        raise UsageError(
            'attention_kernel="flash" needs a mesh: give mesh=Mesh(np.array(jax.devices()), ("data",)), '
            'or use attention_kernel="dot_product"'
        )
    layout = Layout.of(model.mesh, model.logical_axis_rules, strict=model.strict)
    if model.pipeline_patches and not type(model).takes_patches:
        raise UsageError(
            f"pipeline_patches={model.pipeline_patches}: {type(model).__name__} has no sequence that all its blocks "
            "share, as patch pipelining needs: leave it out"
        )
    if model.pipeline_patches and not model.scan_layers:
        raise UsageError(
            f"pipeline_patches={model.pipeline_patches} needs stacked blocks: write scan_layers=True, or leave it out"
        )
    stages = stage_axes(layout)
    if stages and not model.scan_layers:
        say_idle(layout, stages, "scan_layers=False stacks no blocks: write scan_layers=True")
    pipeline = PipelineSpec(
        schedule=model.pipeline_schedule,  # pyright: ignore[reportArgumentType]  the spec checks the name
        microbatches=model.pipeline_microbatches,
        repeats=model.pipeline_repeats,
        patches=model.pipeline_patches,
        warmup_steps=model.pipeline_warmup_steps,
    )
    if not stages:
        wishes: dict[str, Any] = {"pipeline_microbatches": pipeline.microbatches, "pipeline_repeats": pipeline.repeats}
        wishes["pipeline_schedule"] = None if pipeline.schedule == "gpipe" else pipeline.schedule
        layout.say_of_no_use(wishes, "holds stages: give the mesh an axis 'stage' that the rules leave to layers")
    if layout.divisor("activation_length") == 1:
        wishes = {"context_attention": None if attention.context == "auto" else attention.context}
        wishes["ulysses_degree"] = attention.ulysses
        layout.say_of_no_use(wishes, "cuts sequences: give the mesh an axis 'context' that the rules leave to tokens")
    return Runtime(
        layout=layout,
        dtype=float_dtype(model.dtype, "dtype"),
        weights_dtype=float_dtype(model.weights_dtype, "weights_dtype"),
        precision=_precision(model.precision),
        attention=attention,
        remat=RematSpec(
            policy=model.remat_policy,  # pyright: ignore[reportArgumentType]  the spec checks the names
            save=model.remat_save,  # pyright: ignore[reportArgumentType]
        ),
        quant=quant,
        scan_layers=model.scan_layers,
        pipeline=pipeline,
    )
