"""`maxdiffusion explain`: where every parameter of a model would live on a mesh, what each attention runs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from maxdiffusion.cli.options import Json, Rules, check_name

if TYPE_CHECKING:
    from maxdiffusion.parallel.report import Report, Row
    from maxdiffusion.tools.explain import AttentionRow, ConvolutionRow

LARGEST = 20
"""Rows shown without `--all`, besides those that are not laid out as the rules wish."""


def explain(  # noqa: PLR0913  (an argument is an option of the command line)
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, such as sdxl.")],
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="SIZES", help="Devices on each mesh axis, such as fsdp=8; none are needed.")
    ],
    rules: Rules = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a layout that is not as the rules wish.")] = False,
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
        report = run(model, mesh=spec, rules=rules, strict=strict)
        attention = explain_attention(
            model, mesh=spec, rules=rules, attention=asked, platform=platform, dtype=float_dtype(dtype, "--dtype")
        )
        convolutions = explain_convolutions(model, mesh=spec, rules=rules)
    shape = {axis: size for axis, size in spec.shape().items() if size > 1}
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.items()) or "data=1"
    if as_json:
        totals = {
            name: getattr(report, name) for name in ("parameters", "bytes", "bytes_per_device", "share_per_device")
        }
        calls = {"attention": attention, "convolutions": convolutions}
        output.show_json({"model": model, "mesh": sizes, **totals, "rows": report.rows, **calls})
        return
    rows = report.rows if every else _telling(report)
    output.show_table(["parameter", "shape", "logical names", "spec", "MB per device", "why"], map(_cells, rows))
    if len(rows) < len(report.rows):
        typer.echo(
            f"{len(rows)} of {len(report.rows)} parameters shown: the largest, and all with a reason; --all shows all"
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


def _telling(report: Report) -> list[Row]:
    """The rows with a reason, and the largest, in the order of the report."""
    largest = sorted(report.rows, key=lambda row: row.bytes_per_device, reverse=True)[:LARGEST]
    shown = {row.parameter for row in largest}
    return [row for row in report.rows if row.why or row.parameter in shown]


def _cells(row: Row) -> tuple[str, ...]:
    spec = ", ".join("+".join(axes) or "-" for axes in row.spec)
    shape = " x ".join(map(str, row.shape))
    names = ", ".join(name or "-" for name in row.names)
    return row.parameter, shape, names, spec, f"{row.bytes_per_device / 1e6:.3f}", row.why


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
