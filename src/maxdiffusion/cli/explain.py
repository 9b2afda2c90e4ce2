"""`maxdiffusion explain`: where every parameter of a model would live on a mesh, what each attention runs, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from maxdiffusion.cli.options import Json, Rules, check_name

if TYPE_CHECKING:
    from maxdiffusion.parallel.report import Row
    from maxdiffusion.tools.explain import AttentionRow, ConvolutionRow

LARGEST = 20
"""Rows shown without `--all`, besides those that are not laid out as the rules wish."""


def explain(  # noqa: PLR0913  (an argument is an option of the command line)
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, such as sdxl.")],
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            metavar="SIZES",
            help="Devices on each mesh axis, such as fsdp=8; none are needed. Other axis names: explain() in Python.",
        ),
    ],
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
    from maxdiffusion.specs import AttentionSpec, MeshSpec

    check_name("--model", model, get_args(ModelName))
    check_name("--rules", rules, get_args(RulePreset))
    check_name("--platform", platform, ("cpu", "gpu", "tpu"))
    spec = MeshSpec.parse(mesh)
    asked = AttentionSpec(kernel=kernel, context=context)  # pyright: ignore[reportArgumentType]  it checks the names
    from maxdiffusion.nn.model import float_dtype
    from maxdiffusion.tools.explain import check_counted, explain_attention, explain_convolutions
    from maxdiffusion.tools.explain import explain as run

    for axis, size in mesh_sizes(mesh).items():
        check_counted(axis, size)
    with output.reserved():
        report = run(model, mesh=spec, logical_axis_rules=rules, strict=strict, scan_layers=scan_layers)
        attention = explain_attention(
            model,
            mesh=spec,
            logical_axis_rules=rules,
            attention=asked,
            platform=platform,
            dtype=float_dtype(dtype, "--dtype"),
        )
        convolutions = explain_convolutions(model, mesh=spec, logical_axis_rules=rules)
    shape = {axis: size for axis, size in spec.shape().items() if size > 1}
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.items()) or "data=1"
    if as_json:
        totals = {
            name: getattr(report, name) for name in ("parameters", "bytes", "bytes_per_device", "share_per_device")
        }
        calls = {"attention": attention, "convolutions": convolutions}
        output.show_json({"model": model, "mesh": sizes, **totals, "rows": report.rows, **calls})
        return
    kinds = [_Kind(path=row.parameter, row=row, count=1) for row in report.rows] if every else _kinds(report.rows)
    shown = kinds if every else _telling(kinds)
    output.show_table(["parameter", "shape", "logical names", "spec", "MB per device", "why"], map(_cells, shown))
    if not every:
        number = sum(kind.count for kind in shown)
        typer.echo(
            f"{number} of {len(report.rows)} parameters shown: the largest, and all that are not as the rules wish; "
            "equal ones of several blocks are one row (xN, with the MB of all N); --all shows each"
        )
    columns = ["attention", "calls", "queries", "keys", "heads", "kernel", "tiles", "context", "why"]
    output.show_table(columns, _attentions(attention))
    if convolutions:
        columns = ["convolution", "calls", "height", "width", "kernel", "stride", "rows of a device", "why"]
        output.show_table(columns, _convolutions(convolutions))
    typer.echo(
        f"{model} on {sizes}: {report.parameters:,} parameters, {report.bytes / 1e6:,.1f} MB, "
        f"{report.bytes_per_device / 1e6:,.1f} MB on each device ({report.share_per_device:.1%})"
    )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Parameters that differ in the numbers of their blocks only: the path with `*` for these, one row, how many."""

    path: str
    row: Row
    count: int


def _kinds(rows: Sequence[Row]) -> list[_Kind]:
    """Rows that are equal but for the numbers in their paths, folded into one, in the order of the first of each."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike = re.sub(r"(?<=_)\d+", "*", row.parameter)
        kinds.setdefault((alike, row.shape, row.dtype, row.names, row.spec, row.why), []).append(row)
    return [
        _Kind(path=_common([row.parameter for row in same]), row=same[0], count=len(same)) for same in kinds.values()
    ]


def _common(paths: Sequence[str]) -> str:
    """`blocks_*/net_0/bias` of paths that differ in numbers only: a number that all share stays."""
    pieces = zip(*(re.split(r"((?<=_)\d+)", path) for path in paths), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def _telling(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Those that are not laid out as the rules wish, and the largest, in the order of the report."""
    from maxdiffusion.parallel.layout import NO_RULE

    largest = sorted(kinds, key=lambda kind: kind.row.bytes_per_device * kind.count, reverse=True)[:LARGEST]
    shown = {id(kind) for kind in largest}
    return [kind for kind in kinds if kind.row.why not in ("", NO_RULE) or id(kind) in shown]


def _cells(kind: _Kind) -> tuple[str, ...]:
    row = kind.row
    spec = ", ".join("+".join(axes) or "-" for axes in row.spec)
    shape = " x ".join(map(str, row.shape))
    names = ", ".join(name or "-" for name in row.names)
    path = f"{kind.path} x{kind.count}" if kind.count > 1 else kind.path
    return path, shape, names, spec, f"{kind.count * row.bytes_per_device / 1e6:.3f}", row.why


def _attentions(rows: Sequence[AttentionRow]) -> list[tuple[str, ...]]:
    """A line for each kind of attention: the first module that calls it, how many do, and what it runs."""
    kinds: dict[tuple[object, ...], list[AttentionRow]] = {}
    for row in rows:
        kinds.setdefault((row.queries, row.keys, row.reason), []).append(row)
    lines = []
    for row, count in ((same[0], len(same)) for same in kinds.values()):
        tiles = f"{row.block_sizes.block_q} x {row.block_sizes.block_k}" if row.block_sizes else "-"
        sizes = (str(size) for size in (count, row.queries[1], row.keys[1], row.queries[2]))
        lines.append((row.module, *sizes, row.kernel, tiles, row.context, row.reason))
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
