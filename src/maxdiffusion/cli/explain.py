"""`maxdiffusion explain`: where every parameter of a model would live on a mesh, what each attention runs, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from maxdiffusion.cli.options import Json, MeshAxes, Rules, check_name, mesh_spec

if TYPE_CHECKING:
    from maxdiffusion.nn.quantisation import QuantRow
    from maxdiffusion.parallel.report import Row
    from maxdiffusion.tools.explain import AttentionRow, ConvolutionRow

AS_ITS_STACK = "as its stack"
"""Why a parameter is not laid out as the rules wish, where the row of its stack says it."""

LARGEST = 20
"""Rows shown without `--all`, besides those that are not laid out as the rules wish."""


def explain(  # noqa: PLR0913  (an argument is an option of the command line)
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, such as sdxl.")],
    mesh: Annotated[
        str,
        typer.Option("--mesh", metavar="SIZES", help="Devices on each mesh axis, such as fsdp=8; none are needed."),
    ],
    mesh_axes: MeshAxes = None,
    rules: Rules = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a layout that is not as the rules wish.")] = False,
    scan_layers: Annotated[
        bool | None,
        typer.Option(
            "--scan-layers/--no-scan-layers",
            help="Stack equal blocks, as pipelines need; without it, where the mesh has stages.",
        ),
    ] = None,
    kernel: Annotated[
        str, typer.Option("--attention-kernel", metavar="NAME", help="dot_product or flash.")
    ] = "dot_product",
    context: Annotated[
        str, typer.Option("--context-attention", metavar="NAME", help="auto, ring, ulysses, hybrid or gather.")
    ] = "auto",
    platform: Annotated[
        str | None, typer.Option("--platform", metavar="NAME", help="cpu, gpu or tpu; without it, this machine's.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="float32 or bfloat16.")] = "float32",
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", metavar="MODE", help="List also what int8, fp8, fp8_full or int4 quantises."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every parameter.")] = False,
    as_json: Json = False,
) -> None:
    """Show where each parameter lives on a mesh, its bytes on each device, why any is not sharded, what the attentions
    run and exchange, and how the rows of feature maps are cut.

    Makes no weights and needs no devices.
    """
    from typing import get_args

    from maxdiffusion.cli import output
    from maxdiffusion.config.schema import ModelName, RulePreset, mesh_sizes
    from maxdiffusion.specs import AttentionKernel, ContextAttention, QuantMode

    check_name("--model", model, get_args(ModelName))
    check_name("--rules", rules, get_args(RulePreset))
    check_name("--platform", platform, ("cpu", "gpu", "tpu"))
    check_name("--attention-kernel", kernel, get_args(AttentionKernel))
    check_name("--context-attention", context, get_args(ContextAttention))
    check_name("--quantization", quantization, get_args(QuantMode))
    spec = mesh_spec(mesh, mesh_axes)
    from maxdiffusion.nn.model import float_dtype
    from maxdiffusion.tools.explain import check_counted, explain_attention, explain_convolutions, explain_quantisation
    from maxdiffusion.tools.explain import explain as run

    for axis, size in mesh_sizes(mesh).items():
        check_counted(axis, size)
    with output.reserved():
        report = run(model, mesh=spec, logical_axis_rules=rules, strict=strict, scan_layers=scan_layers)
        attention = explain_attention(
            model,
            mesh=spec,
            platform=platform,
            scan_layers=scan_layers,
            logical_axis_rules=rules,
            attention_kernel=kernel,
            context_attention=context,
            dtype=float_dtype(dtype, "--dtype"),
        )
        convolutions = explain_convolutions(model, mesh=spec, logical_axis_rules=rules)
        stacked = {"mesh": spec, "scan_layers": scan_layers}
        layers = explain_quantisation(model, quantization, **stacked) if quantization else ()
    shape = {axis: size for axis, size in spec.shape().items() if size > 1}
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.items()) or f"{spec.rest}=1"
    if as_json:
        totals = {
            name: getattr(report, name) for name in ("parameters", "bytes", "bytes_per_device", "share_per_device")
        }
        calls = {"attention": attention, "convolutions": convolutions, "quantization": layers}
        output.show_json({"model": model, "mesh": sizes, **totals, "rows": report.rows, **calls})
        return
    stacks = {} if every else _unmet_stacks(report.rows)
    if every:
        shown = [
            _Kind(path=row.parameter, row=row, count=1, bytes_per_device=row.bytes_per_device) for row in report.rows
        ]
    else:
        shown = _telling(_kinds(_with_stacks(report.rows, stacks)))
    output.show_table(["parameter", "shape", "logical names", "spec", "MB per device", "why"], map(_cells, shown))
    if not every:
        apart = {id(row) for row in report.rows}.difference(id(row) for rows in stacks.values() for row in rows)
        number = len(report.rows) - len(apart) + sum(kind.count for kind in shown if id(kind.row) in apart)
        typer.echo(
            f"{number} of {len(report.rows)} parameters shown: the largest, and all that are not as the rules wish; "
            "equal ones of several blocks are one row (xN, with the MB of all N)"
            + (", and so is a stack that as a whole is not (/*, with the MB of all its parameters)" if stacks else "")
            + "; --all shows each"
        )
    columns = ["attention", "calls", "queries", "keys", "heads", "kernel", "tiles", "context", "why"]
    output.show_table(columns, _attentions(attention))
    if convolutions:
        columns = ["convolution", "calls", "height", "width", "kernel", "stride", "rows of a device", "why"]
        output.show_table(columns, _convolutions(convolutions))
    if layers:
        output.show_table(["layer", "layers", "products", "stored in", "why"], _quantised(layers))
    typer.echo(
        f"{model} on {sizes}: {report.parameters:,} parameters, in float32 {report.bytes / 1e6:,.1f} MB, "
        f"{report.bytes_per_device / 1e6:,.1f} MB on each device ({report.share_per_device:.1%})"
    )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Parameters, or stacks, that differ in the numbers of their blocks only: the path with `*` for these, one row, how
    many, and what they have on a device together."""

    path: str
    row: Row
    count: int
    bytes_per_device: int


def _kinds(rows: Sequence[Row]) -> list[_Kind]:
    """Rows that are equal but for the numbers in their paths, folded into one, in the order of the first of each."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault((_alike(row.parameter), row.shape, row.dtype, row.names, row.spec, row.why), []).append(row)
    return [
        _Kind(
            path=_common([row.parameter for row in same]),
            row=same[0],
            count=len(same),
            bytes_per_device=sum(row.bytes_per_device for row in same),
        )
        for same in kinds.values()
    ]


def _unmet_stacks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each stack none of whose parameters is as the rules wish, all for one reason: by the stack's path.

    A stack is the outermost module whose parameters all have a first dimension `layers`.
    """
    from maxdiffusion.parallel.layout import NO_RULE

    layered: dict[str, bool] = {}
    for row in rows:
        for path in _modules(row):
            layered[path] = layered.get(path, True) and row.names[:1] == ("layers",)
    stacks: dict[str, list[Row]] = {}
    for row in rows:
        path = next((path for path in _modules(row) if layered[path]), None)
        if path is not None:
            stacks.setdefault(path, []).append(row)
    return {path: found for path, found in stacks.items() if _reason(found) not in ("", NO_RULE)}


def _modules(row: Row) -> list[str]:
    """Paths of the modules that a parameter lies in, outermost first."""
    parts = row.parameter.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _reason(rows: Sequence[Row]) -> str:
    """What the reasons of all these rows say; empty where they say nothing in common."""
    first, *others = (row.why.split("; ") for row in rows)
    return "; ".join(part for part in first if all(part in other for other in others))


def _with_stacks(rows: Sequence[Row], stacks: Mapping[str, list[Row]]) -> list[Row]:
    """The rows, and before those of a stack one for all of it; they keep the reasons that its row leaves out."""
    of_row = {id(row): path for path, found in stacks.items() for row in found}
    said: list[Row] = []
    for row in rows:
        path = of_row.get(id(row))
        if path is None:
            said.append(row)
            continue
        reason = _reason(stacks[path])
        if row is stacks[path][0]:
            sums = {name: sum(getattr(one, name) for one in stacks[path]) for name in ("bytes", "bytes_per_device")}
            whole = {"parameter": f"{path}/*", "shape": row.shape[:1], "names": row.names[:1], "spec": row.spec[:1]}
            said.append(dataclasses.replace(row, **whole, **sums, why=reason))
        rest = [part for part in row.why.split("; ") if part not in reason.split("; ")]
        said.append(dataclasses.replace(row, why="; ".join(rest) or AS_ITS_STACK))
    return said


def _alike(path: str) -> str:
    """The path with `*` for the numbers of blocks."""
    return re.sub(r"(?<=_)\d+", "*", path)


def _common(paths: Sequence[str]) -> str:
    """`blocks_*/net_0/bias` of paths that differ in numbers only: a number that all share stays."""
    pieces = zip(*(re.split(r"((?<=_)\d+)", path) for path in paths), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def _telling(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Those that are not laid out as the rules wish, and the largest, in the order of the report."""
    from maxdiffusion.parallel.layout import NO_RULE

    largest = sorted(kinds, key=lambda kind: kind.bytes_per_device, reverse=True)[:LARGEST]
    shown = {id(kind) for kind in largest}
    return [kind for kind in kinds if kind.row.why not in ("", NO_RULE, AS_ITS_STACK) or id(kind) in shown]


def _cells(kind: _Kind) -> tuple[str, ...]:
    row = kind.row
    spec = ", ".join("+".join(axes) or "-" for axes in row.spec)
    shape = " x ".join(map(str, row.shape))
    names = ", ".join(name or "-" for name in row.names)
    path = f"{kind.path} x{kind.count}" if kind.count > 1 else kind.path
    return path, shape, names, spec, f"{kind.bytes_per_device / 1e6:.3f}", row.why


def _attentions(rows: Sequence[AttentionRow]) -> list[tuple[str, ...]]:
    """A line for each kind of attention: the modules that call it, in how many blocks, and what it runs."""
    kinds: dict[tuple[object, ...], list[AttentionRow]] = {}
    for row in rows:
        kinds.setdefault((_alike(row.module), row.queries, row.keys, row.reason), []).append(row)
    lines = []
    for same in kinds.values():
        row, blocks = same[0], sum(row.blocks for row in same)
        tiles = f"{row.block_sizes.block_q} x {row.block_sizes.block_k}" if row.block_sizes else "-"
        sizes = (str(size) for size in (blocks, row.queries[1], row.keys[1], row.queries[2]))
        modules = _common([row.module for row in same])
        lines.append((modules, *sizes, row.kernel, tiles, row.context, row.reason))
    return lines


def _convolutions(rows: Sequence[ConvolutionRow]) -> list[tuple[str, ...]]:
    """A line for each kind of convolution: the first one, how many there are, and how its rows are cut."""
    kinds: dict[tuple[object, ...], list[ConvolutionRow]] = {}
    for row in rows:
        kinds.setdefault((row.feature_map[1:3], row.size, row.stride, row.reason), []).append(row)
    lines = []
    for row, count in ((same[0], len(same)) for same in kinds.values()):
        sizes = (str(size) for size in (count, *row.feature_map[1:3], row.size, row.stride, row.rows))
        lines.append((row.module, *sizes, row.reason))
    return lines


def _quantised(rows: Sequence[QuantRow]) -> list[tuple[str, ...]]:
    """A line for the layers that differ in the numbers of their blocks only: how they multiply and are stored."""
    kinds: dict[tuple[object, ...], list[QuantRow]] = {}
    for row in rows:
        kinds.setdefault((_alike(row.module), row.mode, row.stored, row.reason), []).append(row)
    return [
        (_common([row.module for row in same]), str(len(same)), same[0].mode or "plain", same[0].stored, same[0].reason)
        for same in kinds.values()
    ]
