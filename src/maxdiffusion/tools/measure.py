"""What a model's training step moves on a mesh, read from the compiled program, beside the textbook's bytes."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from maxdiffusion.errors import UsageError
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel.mesh import build_mesh, written
from maxdiffusion.parallel.pipeline import num_stages
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import SUMS, Exchange, NoFormulaError, budget
from maxdiffusion.tools.traffic import Traffic, traffic

SMALL = 4096
"""Arrays of at most so many bytes count nowhere: sums of a norm's scale, of a loss, of one vector a sample."""

TOLERANCE = 0.1
"""How far the bytes of a kind of collective may be from the formula's, as a share of these."""

SIZES = {"batch": 16, "height": 16, "width": 16, "text": 32}
"""Of the call: 64 tokens of image and 32 of text in FLUX.1, which 8 devices can share."""

_TWIN: Mapping[str, Mapping[str, Any]] = {"flux": {"num_attention_heads": 8}}
"""Keywords of a family's tiny twin that let 8 devices share its heads."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to use 8 devices.

    Attributes:
        mesh: sizes of the mesh axes.
        keywords: of the model.
    """

    mesh: str
    keywords: Mapping[str, Any] = field(default_factory=dict)


STRATEGIES: dict[str, Strategy] = {
    "data": Strategy(mesh="data=8"),
    "FSDP": Strategy(mesh="fsdp=8"),
    "HSDP": Strategy(mesh="dcn.data=2,fsdp=4", keywords={"logical_axis_rules": "hsdp"}),
    "tensor": Strategy(mesh="data=2,tensor=4"),
    "ring": Strategy(mesh="data=2,context=4", keywords={"context_attention": "ring"}),
    "Ulysses": Strategy(mesh="data=2,context=4", keywords={"context_attention": "ulysses"}),
    "hybrid": Strategy(mesh="data=2,context=4", keywords={"context_attention": "hybrid"}),
    "gather": Strategy(mesh="data=2,context=4", keywords={"context_attention": "gather"}),
    "pipeline": Strategy(mesh="stage=2,data=4"),
    "circular pipeline": Strategy(mesh="stage=2,data=4", keywords={"pipeline_schedule": "circular"}),
    "FSDP and tensor": Strategy(mesh="data=2,fsdp=2,tensor=2"),
    "FSDP and context": Strategy(mesh="fsdp=2,context=4"),
    "guidance and context": Strategy(mesh="cfg=2,context=4"),
    "context and tensor": Strategy(mesh="context=2,tensor=2,data=2"),
    "four stages": Strategy(mesh="data=2,stage=4"),
    "pipeline and tensor": Strategy(mesh="stage=2,tensor=2,data=2"),
    "pipeline and context": Strategy(mesh="stage=2,context=4"),
}
"""Each strategy alone, as small as it can be, and the combinations that are promised."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of collective along the same mesh axes.

    Attributes:
        what: what it moves, after the textbook; empty where that moves nothing.
        kind: of collective.
        instead_of: the textbook's kind, where the compiler uses another one.
        axes: mesh axes, joined by `+`.
        count: arrays of more than `SMALL` bytes that are moved in a step.
        bytes: of these.
        formula: bytes after the textbook, in such arrays.
        formula_count: such arrays after the textbook.
        counted: whether there is a formula for it; else it is shown, and nothing can be wrong.
    """

    what: str
    kind: str
    instead_of: str
    axes: str
    count: int
    bytes: int
    formula: int
    formula_count: int
    counted: bool = True

    @property
    def ratio(self) -> float:
        """Bytes over the formula's."""
        return self.bytes / self.formula if self.formula else float("inf")

    @property
    def ok(self) -> bool:
        """Whether the bytes are the formula's, to `TOLERANCE`."""
        return not self.counted or abs(self.bytes - self.formula) <= TOLERANCE * self.formula


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The traffic of one strategy.

    Attributes:
        strategy: its name; the mesh's where it has none.
        mesh: sizes of the mesh axes.
        rows: the most bytes first.
        no_formula: why there is nothing to compare them with; empty where there is.
    """

    strategy: str
    mesh: str
    rows: tuple[Row, ...]
    no_formula: str = ""

    @property
    def ok(self) -> bool:
        """Whether every row is; where there is no formula, nothing can be wrong."""
        return bool(self.no_formula) or all(row.ok for row in self.rows)


def twin(model: str, mesh: Mesh, keywords: Mapping[str, Any]) -> DiffusionModel:
    """The tiny twin of a registry model that is measured: its blocks stacked, two layers for each stage of the mesh.

    Args:
        model: registry name.
        mesh: devices.
        keywords: of the model, such as `context_attention`.
    """
    spec = lookup(model)
    build = functools.partial(spec.build, "tiny", mesh=mesh, scan_layers=True, **_TWIN.get(spec.family, {}))
    stages = num_stages(build(**keywords).layout)
    return build(**{**(spec.depth(2 * stages) if stages > 1 else {}), **keywords})


def lower_step(model: DiffusionModel) -> jax.stages.Lowered:
    """Forward and backward pass of a mean square for a call of `SIZES`, gradients laid out as their parameters."""
    shapes, names = model.abstract_params()
    shardings = model.layout.shardings(shapes, names)

    def at(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows = model.layout.rows(SIZES["batch"])
    inputs = jax.tree.map(lambda leaf: at(leaf, rows), model.call_shapes(**SIZES))

    def loss(params: Any, inputs: Any) -> jax.Array:
        out = jax.tree.leaves(model.apply({"params": params}, **inputs))[0]
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    return jax.jit(jax.grad(loss), out_shardings=shardings).lower(jax.tree.map(at, shapes, shardings), inputs)


def measure(
    model: str,
    *,
    mesh: MeshSpec | Mesh,
    keywords: Mapping[str, Any] | None = None,
    strategy: str = "",
) -> Measured:
    """Compiles the training step of a model's tiny twin and compares what it moves with the formulas.

    Where there is no formula for the model on this mesh, the result says so, and shows what is moved.

    Args:
        model: registry name.
        mesh: sizes of the mesh axes for the devices there are, or a mesh.
        keywords: of the model, such as `context_attention`.
        strategy: name of the result.

    Raises:
        UsageError: the model or a mesh axis is unknown.
    """
    devices = build_mesh(mesh) if isinstance(mesh, MeshSpec) else mesh
    tried = twin(model, devices, keywords or {})
    try:
        wanted, no_formula = budget(tried, **SIZES), ""
    except NoFormulaError as error:
        wanted, no_formula = (), str(error)
    found = traffic(lower_step(tried).compile().as_text() or "", devices)
    sizes = written(devices)
    return Measured(strategy=strategy or sizes, mesh=sizes, rows=compare(found, wanted), no_formula=no_formula)


def compare(found: Traffic, wanted: Sequence[Exchange]) -> tuple[Row, ...]:
    """A row for each kind of collective and mesh axes that a program uses or a formula names.

    Where the program sums gradients along the axes that store them and those of their replicas at once, the formulas
    of both sums stand in the row of that one.

    Args:
        found: of the compiled program.
        wanted: after the textbook.
    """
    moved = {(kind, tuple(axes.split("+"))): (count, size) for kind, axes, count, size in found.table(above=SMALL)}
    groups: dict[tuple[str, tuple[str, ...]], list[Exchange]] = {}
    for one in _made_elsewhere(found, _summed_at_once(found, wanted)):
        if one.bytes > SMALL and one.count:
            used = next((kind for kind in one.kinds if (kind, one.axes) in moved), one.kinds[0])
            groups.setdefault((used, one.axes), []).append(one)
    uncounted = {(kind, one.axes): one.what for one in wanted if not one.counted for kind in one.kinds}
    rows = []
    for key in dict.fromkeys((*groups, *moved)):
        asked, (count, size) = groups.get(key, []), moved.get(key, (0, 0))
        meant = {one.kinds[0] for one in asked}
        rows.append(
            Row(
                what=", ".join(dict.fromkeys(one.what for one in asked)) or uncounted.get(key, ""),
                kind=key[0],
                instead_of="" if key[0] in meant or not meant else meant.pop(),
                axes="+".join(key[1]),
                count=count,
                bytes=size,
                formula=sum(one.bytes * one.count for one in asked),
                formula_count=sum(one.count for one in asked),
                counted=bool(asked) or key not in uncounted,
            )
        )
    return tuple(sorted(rows, key=lambda row: -max(row.bytes, row.formula)))


def _summed_at_once(found: Traffic, wanted: Sequence[Exchange]) -> list[Exchange]:
    """The formulas, with one sum in place of two halves for each array that the program sums along the axes of both.

    Arrays of one size are interchangeable. Sums along these axes that the textbook has itself come first.
    """
    spare: Counter[tuple[frozenset[str], int]] = Counter()
    for one in found.collectives:
        for size in one.tensors if one.kind == "all-reduce" else ():
            spare[frozenset(one.axes), size] += one.count
    for one in wanted:
        if one.kinds[0] in SUMS:
            spare[frozenset(one.axes), one.bytes] -= one.count
    left = list(wanted)
    halves = [at for at, one in enumerate(wanted) if one.part_of]
    for second, first in itertools.product(halves, range(len(wanted))):
        half, whole = wanted[second], wanted[first]
        key = frozenset((*whole.axes, *half.axes)), whole.bytes
        if whole.kinds[0] in SUMS and not whole.part_of and whole.bytes == half.part_of:
            moved = min(spare[key], left[first].count, left[second].count)
            if moved > 0:
                spare[key] -= moved
                for at in (first, second):
                    left[at] = replace(left[at], count=left[at].count - moved)
                what = (
                    "gradients and replicas"
                    if half.what == "replicas"
                    else "gradients of parts of a sequence and batch"
                )
                left.append(replace(whole, what=what, axes=_joined(found, key[0]), count=moved))
    return left


def _made_elsewhere(found: Traffic, wanted: Sequence[Exchange]) -> list[Exchange]:
    """The formulas, with two moves of a part in place of a sum of the whole, where the program makes that of it.

    A gradient that devices along another axis share (of what reads the time alone, beside `context`) is made there in
    parts: each part is summed, and then moved to where it is stored. Two devices move the bytes of the sum, more
    devices fewer.
    """
    sums, moves = Counter[tuple[tuple[str, ...], int]](), Counter[tuple[tuple[str, ...], int]]()
    for one in found.collectives:
        for size in one.tensors:
            if one.kind in SUMS:
                sums[one.axes, size] += one.count
            if one.kind == "collective-permute" and len(one.axes) > 1:
                moves[one.axes, size] += one.count
    for one in wanted:
        if one.kinds[0] in SUMS:
            sums[one.axes, one.bytes] -= one.count
    left, moved = list(wanted), list[Exchange]()
    # The smallest first: a half of a large one may be as large as a whole that is made in parts itself.
    smallest = sorted((one.bytes, at) for at, one in enumerate(wanted) if one.devices > 1)
    for (whole, at), (axes, size) in itertools.product(smallest, list(moves)):
        one = left[at]
        number = min(moves[axes, size], sums[one.axes, size], one.count) if size == whole // one.devices else 0
        if number > 0:
            moves[axes, size] -= number
            sums[one.axes, size] -= number
            sums[one.axes, whole] += number
            left[at] = replace(one, count=one.count - number)
            part = replace(one, bytes=size, count=number)
            what = "gradients, to where they are stored"
            moved += [part, replace(part, what=what, kinds=("collective-permute",), axes=axes)]
    return [*left, *moved]


def _joined(found: Traffic, axes: frozenset[str]) -> tuple[str, ...]:
    """These axes in the order in which the program's collectives name them."""
    return next(one.axes for one in found.collectives if frozenset(one.axes) == axes)


def measure_all(model: str, *, on_result: Callable[[Measured], None] = lambda result: None) -> tuple[Measured, ...]:
    """Every strategy on 8 devices.

    Args:
        model: registry name.
        on_result: called after each.

    What cannot be on its mesh, such as a swap of fewer heads than devices, says so in its result.

    Raises:
        UsageError: there are not 8 devices, or the model is unknown.
    """
    results = []
    for name, one in STRATEGIES.items():
        mesh = build_mesh(MeshSpec.parse(one.mesh))
        try:
            results.append(measure(model, mesh=mesh, keywords=one.keywords, strategy=name))
        except UsageError as error:
            results.append(Measured(strategy=name, mesh=written(mesh), rows=(), no_formula=str(error)))
        on_result(results[-1])
    return tuple(results)


COLUMNS = (
    "strategy",
    "mesh",
    "what",
    "collective",
    "axes",
    "arrays",
    "bytes",
    "formula_arrays",
    "formula_bytes",
    "ratio",
)
"""Of the table: keys of a row."""


def as_rows(result: Measured) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [
        {
            "strategy": result.strategy,
            "mesh": result.mesh,
            "what": row.what or ("no formula" if result.no_formula else "nothing by the textbook"),
            "collective": row.kind + (f" for {row.instead_of}" if row.instead_of else ""),
            "axes": row.axes,
            "arrays": row.count,
            "bytes": row.bytes,
            "formula_arrays": None if result.no_formula or not row.counted else row.formula_count,
            "formula_bytes": None if result.no_formula or not row.counted else row.formula,
            "ratio": row.ratio if row.formula else None,
            "ok": row.ok or bool(result.no_formula),
        }
        for row in result.rows
    ]


def as_markdown(results: Iterable[Measured]) -> str:
    """A table with a line for each row."""
    lines = [f"| {' | '.join(column.replace('_', ' ') for column in COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for result in results:
        for row in as_rows(result):
            lines.append(f"| {' | '.join(as_text(row[column]) for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def as_text(value: Any) -> str:
    """A value for people: whole numbers in groups of three digits, ratios to three places, a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
