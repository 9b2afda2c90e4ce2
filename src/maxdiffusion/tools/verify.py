"""The same numbers on a mesh as on one device: a model's tiny twin, run both ways for a matrix of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from maxdiffusion.common_types import LogicalAxisRules
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import plan_context
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.attention import attention_calls
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.nn.stack import stack_params, unstack_params
from maxdiffusion.parallel.mesh import build_mesh, written
from maxdiffusion.parallel.pipeline import num_stages, stage_axes
from maxdiffusion.specs import AttentionSpec, MeshSpec, QuantMode

LIMITS = {
    "float32": {"forward": 1e-6, "first_loss": 1e-6, "gradients": 1e-5, "worst_gradient": 1e-5, "loss": 1e-5},
    "bfloat16": {"forward": 2e-2, "gradients": 4e-2, "loss": 5e-3},
    "int8": {"middle_sample": 1e-6, "loss": 5e-3},
    "fp8": {"middle_sample": 1e-6, "loss": 2e-2},
    "fp8_full": {"middle_sample": 1e-6, "loss": 2e-2},
    "int4": {"forward": 1e-6, "first_loss": 1e-6, "gradients": 1e-5, "worst_gradient": 1e-5, "loss": 1e-2},
}
"""Largest relative errors against one device in the same dtype and quantisation.

`gradients` is the norm over the whole tree, `worst_gradient` that of a leaf, `loss` comes after `NUM_STEPS` steps.
Float32 sums in another order differ by about 1e-7, which some thirty layers multiply; the limits are those of the
twins, and a wider network sums more terms. bfloat16 keeps 8 bits, so that activations rounded in another order differ
by 4e-3 and more, and gradients, which pass every layer twice, by twice as much; the limits leave room for the deep
twins of meshes with stages, on which meshes without any are as far off (`docs/parallelism.md` has both).

Quantised values are the same on every mesh, but where the last bit of a float32 sum puts one on the other side of a
border between two: then it differs by a whole step, as it does from the value that was rounded, and what follows is
rounded anew. No sample has a say in the scales of another, so that this happens to few of them: `middle_sample`, the
median of the samples' own errors, is held as exactly as in float32. As a whole no mesh may be further from one device
than rounding itself is from none, on the same twin (int8: 1e-2 for FLUX.1, 3e-2 for a UNet)."""

MESHES = (
    "data=8",
    "fsdp=8",
    "data=2,fsdp=2,tensor=2",
    "fsdp=2,context=4",
    "data=2,stage=4",
    "stage=2,tensor=2,data=2",
    "cfg=2,context=4",
    "context=2,tensor=2,data=2",
    "dcn.data=2,fsdp=4",
    "stage=2,context=4",
)
"""Of eight devices: each strategy alone, and the combinations that are promised. The table of the docs has them all."""

ROUNDED = ("forward", "gradients")
"""What the modes of quantised products are held to by what they are off by themselves."""

NUM_STEPS = 10
"""Optimizer steps."""

SMALL_LEAF = 1e-3
"""A leaf's error counts against its own norm, or this share of the whole tree's if that is larger: a leaf whose true
gradient is zero holds rounding noise and nothing else."""

_OPTIMIZER = optax.adamw(1e-3)

_DEGREE = 2
"""Devices in a Ulysses group of `hybrid`."""

_SIDE, _TEXT = 8, 8
"""Latents of 8 x 8, and 8 tokens of text: what a sequence can be cut into over 8 devices."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a model.

    Attributes:
        attention: kernel; `flash` runs at any length here.
        context: how a sequence that is cut over the mesh is attended.
        pipeline: schedule of stacked blocks over their stages.
        dtype: of activations and products; the weights are float32.
        remat: what the backward pass recomputes: a policy, and after a plus the activations that it saves.
        scan: whether equal blocks are stacked and scanned.
        masked: whether the text has padding, where the model takes a mask of it.
        quantization: mode of quantised products, or `none`.
    """

    attention: str = "dot_product"
    context: str = "auto"
    pipeline: str = "gpipe"
    dtype: str = "float32"
    remat: str = "none"
    scan: bool = False
    masked: bool = False
    quantization: str = "none"

    @property
    def numerics(self) -> dict[str, Any]:
        """Keywords of what decides the numbers, on one device as on many."""
        return {"dtype": self.dtype, "quantization": None if self.quantization == "none" else self.quantization}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one setting gave.

    Attributes:
        setting: how the model ran.
        errors: relative error of each quantity.
        limits: of those that have one here.
        quantity: the one nearest to its limit, or furthest beyond it.
        error: its error.
        limit: its limit.
        ok: whether every quantity holds its limit.
        seconds: that the cell took, compilation included.
    """

    setting: Setting
    errors: dict[str, float]
    limits: dict[str, float]
    quantity: str
    error: float
    limit: float
    ok: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """Every cell of a verification.

    Attributes:
        model: registry name.
        mesh: sizes of the mesh axes.
        twin: how deep the twin is for a mesh with stages; empty where it is the usual one.
        cells: in the order in which they ran.
        ok: whether all hold.
    """

    model: str
    mesh: str
    twin: str = ""
    cells: tuple[Cell, ...]

    @property
    def ok(self) -> bool:
        return all(cell.ok for cell in self.cells)


class _Outcome(NamedTuple):
    """Prediction, first loss and gradients before any step, and the loss after `NUM_STEPS`; on the host, in float64."""

    forward: np.ndarray
    first_loss: float
    gradients: Any
    loss: float


def verify(
    model: str,
    *,
    mesh: MeshSpec | Mesh,
    logical_axis_rules: LogicalAxisRules | str | None = None,
    every: bool = False,
    only: Sequence[Setting] | None = None,
    on_start: Callable[[int, str, str], None] = lambda number, mesh, twin: None,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> VerifyResult:
    """Compares the tiny twin of a model on a mesh with one device: forward, gradients, and ten steps of training.

    Args:
        model: registry name.
        mesh: sizes of the mesh axes for the devices there are, or a mesh.
        logical_axis_rules: rules that come before the defaults, the name of a preset, or None.
        every: every combination of settings; False takes a set in which each pair of values occurs.
        only: these settings and no others.
        on_start: called once before anything is compiled, with the number of settings, the sizes of the mesh axes, and
            what a mesh with stages makes of the twin (empty without stages).
        on_cell: called after each cell.

    Raises:
        UsageError: the model, a mesh axis or a rule is unknown.
    """
    devices = build_mesh(mesh) if isinstance(mesh, MeshSpec) else mesh
    spec = lookup(model)
    build = functools.partial(spec.build, "tiny", precision="highest")
    probe = build(mesh=devices, logical_axis_rules=logical_axis_rules, scan_layers=True)
    chosen = settings(probe, every=every) if only is None else list(only)
    stages, twin = num_stages(probe.layout), ""
    if stages > 1:
        # Two layers a stage, so that a circular schedule has two rounds.
        build = functools.partial(build, **spec.depth(2 * stages))
        twin = _depth_said(build, 2 * stages)
    on_start(len(chosen), written(devices), twin)
    batch = max(8, 2 * probe.layout.batch_divisor)
    if batch % probe.layout.batch_divisor:
        batch = 2 * probe.layout.batch_divisor
    weights = jax.device_get(build().init_weights(jax.random.key(0)))
    example = functools.cache(functools.partial(_example, probe, batch))

    @functools.cache
    def alone(numerics: tuple[tuple[str, Any], ...], masked: bool) -> _Outcome:
        return _run(build(**dict(numerics)), weights, *example(masked))

    cells = []
    for setting in chosen:
        began = time.perf_counter()
        tried = build(
            mesh=devices,
            logical_axis_rules=logical_axis_rules,
            attention_kernel=setting.attention,
            flash_min_seq_length=0,
            context_attention=setting.context,
            ulysses_degree=_DEGREE if setting.context == "hybrid" else None,
            pipeline_schedule=setting.pipeline,
            **setting.numerics,
            remat_policy=setting.remat.partition("+")[0],
            remat_save=setting.remat.partition("+")[2],
            scan_layers=setting.scan,
        )
        wanted = alone(tuple(setting.numerics.items()), setting.masked)
        limits = dict(LIMITS[setting.dtype if setting.quantization == "none" else setting.quantization])
        if "forward" not in limits:
            plain = alone(tuple((setting.numerics | {"quantization": None}).items()), setting.masked)
            limits |= {name: error for name, error in _compare(wanted, plain).items() if name in ROUNDED}
        errors = _compare(_run(tried, weights, *example(setting.masked)), wanted)
        cells.append(_cell(setting, errors, limits, time.perf_counter() - began))
        on_cell(cells[-1])
    return VerifyResult(model=model, mesh=written(devices), twin=twin, cells=tuple(cells))


def settings(model: DiffusionModel, *, every: bool) -> list[Setting]:
    """The settings that mean something on the model's mesh: exact ones first, then rounded and quantised ones.

    Only float32 shows a small fault, so all that is not about rounding is combined there.

    Args:
        model: on the mesh; its rules say whether sequences and stacks are cut.
        every: the whole product, in float32 and in bfloat16; False gives a set in which each pair of values of two
            settings occurs in float32, and each value in bfloat16. Each mode of quantisation is tried once.
    """
    layout = model.layout
    parts = layout.divisor("activation_length")
    staged = bool(stage_axes(layout))
    exchanges = ("ring", "auto", "gather", *(("hybrid",) if parts > _DEGREE and _has_groups(model) else ()))
    options: dict[str, tuple[Any, ...]] = {
        "attention": ("dot_product", "flash"),
        "context": exchanges if parts > 1 else ("auto",),
        "pipeline": ("gpipe", "circular") if staged else ("gpipe",),
        # Where there is no memory to offload to, the last one is `full` with named activations.
        "remat": ("none", "minimal", "full", "offload+attention,hidden"),
        # Stages hold stacked blocks: unstacked ones would not be cut at all.
        "scan": (True,) if staged else (False, True),
        "masked": (False, True) if _mask_name(model) else (False,),
    }
    product = [Setting(**dict(zip(options, values, strict=True))) for values in itertools.product(*options.values())]
    once = _covering(product, 1)
    exact, rounded = (product, product) if every else (_covering(product, 2), once)
    return [
        *exact,
        *(dataclasses.replace(one, dtype="bfloat16") for one in rounded),
        *(
            dataclasses.replace(one, quantization=mode)
            for mode, one in zip(get_args(QuantMode), itertools.cycle(once), strict=False)
        ),
    ]


def _has_groups(model: DiffusionModel) -> bool:
    """Whether every attention of the model can swap tokens for heads in groups of `_DEGREE` devices."""
    network, layout = model.alone(), model.layout
    inputs = network.call_shapes(layout.batch_divisor, height=_SIDE, width=_SIDE, text=_TEXT)

    def call(params: Any, inputs: Any) -> Any:
        return network.apply({"params": params}, **inputs)

    spec = AttentionSpec(context="hybrid", ulysses=_DEGREE)
    try:
        for _, found in attention_calls(call, network.abstract_params()[0], inputs):
            plan_context(found.q_shape, found.k_shape, spec=spec, layout=layout, full_mask=found.full_mask)
    except UsageError:
        return False
    return True


def _covering(product: list[Setting], size: int) -> list[Setting]:
    """Few of these in which every combination of `size` values still occurs: each adds the most that are missing."""

    def combinations(one: Setting) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(dataclasses.asdict(one).items(), size))

    missing = set[tuple[Any, ...]]().union(*map(combinations, product))
    chosen = []
    while missing:
        chosen.append(max(product, key=lambda one: len(combinations(one) & missing)))
        missing -= combinations(chosen[-1])
    return chosen


def _depth_said(build: Callable[..., DiffusionModel], layers: int) -> str:
    """Which parts of a twin hold stacks of this many layers for the stages to cut, and whether others have one."""
    stacked, plain = (build(scan_layers=scan).abstract_params()[0] for scan in (True, False))
    names = _stack_names(stacked, plain)

    def depths(tree: Any) -> set[int]:
        """Of the stacks in a tree."""
        parts = tree.items() if isinstance(tree, dict) else ()
        own = {jax.tree.leaves(part)[0].shape[0] for name, part in parts if name in names}
        return own.union(*(depths(part) for name, part in parts if name not in names))

    deep = ", ".join(name for name in stacked if layers in depths({name: stacked[name]}))
    if depths(stacked) == {layers}:
        return f"{layers} layers in {deep}"
    return f"{layers} layers in {deep} alone: its other stacks have one layer, which every stage runs alike"


def _mask_name(model: DiffusionModel) -> str | None:
    """The argument of a call that says which tokens of the text are no padding."""
    taken = inspect.signature(type(model).__call__).parameters
    return next((name for name in ("encoder_attention_mask", "mask") if name in taken), None)


def _example(model: DiffusionModel, batch: int, masked: bool) -> tuple[Any, Float[np.ndarray, "..."]]:
    """Inputs of a call with random numbers, and something to aim at."""
    shapes = model.call_shapes(batch, height=_SIDE, width=_SIDE, text=_TEXT)
    name, random = _mask_name(model), np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return random.standard_normal(leaf.shape, np.float32)
        return random.integers(1, 8, leaf.shape).astype(leaf.dtype)

    inputs = jax.tree.map(values, shapes)
    if name is not None and masked:
        seen = random.random((batch, _TEXT)) < 0.5
        seen[:, 0] = True
        seen[0] = np.arange(_TEXT) == 0  # one token is left, so that whole parts of a sequence hide
        inputs[name] = seen
    single = model.alone()
    params = jax.eval_shape(lambda: single.init(jax.random.key(0), **inputs))
    like = jax.tree.leaves(jax.eval_shape(lambda tree: single.apply(tree, **inputs), params))[0]
    return inputs, random.standard_normal(like.shape, np.float32)


@jax.jit
def _advance(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    """A step of the optimizer: a program of its own, which all settings of a mesh share."""
    updates, opt_state = _OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _run(model: DiffusionModel, plain: Any, inputs: Any, target: np.ndarray) -> _Outcome:
    """Ten steps of AdamW towards the target, in compiled functions, from the unrolled weights `plain`."""
    shapes, names = model.abstract_params()
    stacks = _stack_names(shapes, plain)
    params = functools.reduce(stack_params, stacks, plain)
    rows = model.layout.rows(target.shape[0])
    arrays, placed = (inputs, target), None
    if rows is not None:
        placed = model.layout.shardings(shapes, names)
        params = jax.device_put(params, placed)
        arrays = jax.device_put(arrays, rows)

    @functools.partial(jax.jit, out_shardings=(None, placed))
    def gradients_of(params: Any, inputs: Any, target: Array) -> tuple[tuple[Array, Array], Any]:
        def loss(params: Any) -> tuple[Array, Array]:
            out = jax.tree.leaves(model.apply({"params": params}, **inputs))[0].astype(jnp.float32)
            # As in training, a mean of the samples' means: one sum over all numbers would itself be 1e-6 off.
            return jnp.mean(jnp.mean(jnp.square(out - target), axis=tuple(range(1, out.ndim)))), out

        return jax.value_and_grad(loss, has_aux=True)(params)

    opt_state, first, value = _OPTIMIZER.init(params), None, jnp.zeros(())
    for _ in range(NUM_STEPS + 1):
        (value, out), gradients = gradients_of(params, *arrays)
        first = first or (out, value, gradients)
        params, opt_state = _advance(params, opt_state, gradients)
    assert first is not None
    out, first_loss, gradients = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), first)
    gradients = functools.reduce(unstack_params, stacks, gradients)
    return _Outcome(forward=out, first_loss=float(first_loss), gradients=gradients, loss=float(value))


def _compare(got: _Outcome, wanted: _Outcome) -> dict[str, float]:
    """Relative error of each quantity; `nan` for what is not finite."""
    differences = jax.tree.map(lambda a, b: _norm(a - b), got.gradients, wanted.gradients)
    norms = jax.tree.map(_norm, wanted.gradients)
    whole = _norm(np.array(jax.tree.leaves(norms)))
    leafwise = jax.tree.map(lambda error, norm: error / max(norm, SMALL_LEAF * whole), differences, norms)
    samples = zip(got.forward - wanted.forward, wanted.forward, strict=True)
    return {
        "middle_sample": float(np.median([_norm(error) / _norm(one) for error, one in samples])),
        "gradients": _norm(np.array(jax.tree.leaves(differences))) / whole,
        "worst_gradient": float(np.max(np.array(jax.tree.leaves(leafwise)))),
        "forward": _norm(got.forward - wanted.forward) / _norm(wanted.forward),
        "first_loss": abs(got.first_loss - wanted.first_loss) / abs(wanted.first_loss),
        "loss": abs(got.loss - wanted.loss) / abs(wanted.loss),
    }


def _stack_names(stacked: Any, plain: Any) -> set[str]:
    """Names of the stacks of a scanned tree whose blocks the unrolled tree holds one by one."""
    if not isinstance(stacked, dict):
        return set()
    inner = (_stack_names(value, plain[key]) for key, value in stacked.items() if key in plain)
    return {key for key in stacked if key not in plain}.union(*inner)


def _norm(array: Any) -> float:
    return float(np.sqrt(np.sum(np.square(np.asarray(array, np.float64)))))


def _cell(setting: Setting, errors: dict[str, float], limits: dict[str, float], seconds: float) -> Cell:
    # A quantity that is not a number is beyond every limit.
    ratio = {name: np.nan_to_num(errors[name] / limit, nan=np.inf) for name, limit in limits.items()}
    worst = max(ratio, key=lambda name: ratio[name])
    return Cell(
        setting=setting,
        errors=errors,
        limits=limits,
        quantity=worst,
        error=errors[worst],
        limit=limits[worst],
        ok=bool(ratio[worst] <= 1),
        seconds=seconds,
    )


def as_row(cell: Cell) -> dict[str, Any]:
    """The cell as plain values, its settings beside its figures."""
    return {**dataclasses.asdict(cell.setting), **{k: v for k, v in dataclasses.asdict(cell).items() if k != "setting"}}
