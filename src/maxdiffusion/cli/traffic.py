"""`maxdiffusion traffic`: what a training step moves between devices, beside the textbook's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from maxdiffusion.cli.options import Json, Mesh, MeshAxes, Rules, VirtualDevices, check_name, mesh_spec

if TYPE_CHECKING:
    from maxdiffusion.tools.measure import Measured


def traffic(  # noqa: PLR0913  (an argument is an option of the command line)
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, such as flux-dev.")],
    mesh: Mesh = None,
    mesh_axes: MeshAxes = None,
    rules: Rules = None,
    context: Annotated[
        str | None, typer.Option("--context-attention", metavar="NAME", help="auto, ring, ulysses, hybrid or gather.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--pipeline-schedule", metavar="NAME", help="gpipe or circular, on a mesh of stages.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    virtual_devices: VirtualDevices = None,
    as_json: Json = False,
) -> None:
    """Compile the training step of a model's tiny twin and compare what it moves with each strategy's formula.

    Without --mesh, one mesh of 8 devices for each strategy. Exit status is 1 when bytes are not the formula's;
    where there is no formula for a mesh, that is said, and what it moves is shown.
    """
    from typing import get_args

    from maxdiffusion.cli import devices, output
    from maxdiffusion.config.schema import ModelName, RulePreset
    from maxdiffusion.errors import UsageError
    from maxdiffusion.specs import ContextAttention, MeshSpec, PipelineSchedule

    check_name("--model", model, get_args(ModelName))
    check_name("--rules", rules, get_args(RulePreset))
    check_name("--context-attention", context, get_args(ContextAttention))
    check_name("--pipeline-schedule", schedule, get_args(PipelineSchedule))
    if as_json and markdown:
        raise UsageError("--json and --markdown are two forms of one result: write one of them")
    if mesh is None and (mesh_axes, rules, context, schedule) != (None,) * 4:
        raise UsageError(
            "--mesh-axes, --rules, --context-attention and --pipeline-schedule are for one mesh: give it, such as "
            "--mesh data=2,context=4"
        )
    spec = mesh_spec(mesh, mesh_axes) if mesh is not None else None
    devices.make_virtual_devices(virtual_devices)
    from maxdiffusion.tools.measure import COLUMNS, SMALL, as_markdown, as_rows, as_text, measure, measure_all

    keywords: dict[str, Any] = {
        "context_attention": context or "auto",
        "pipeline_schedule": schedule or "gpipe",
        "logical_axis_rules": rules,
    }
    with output.reserved():
        if spec is None:
            with devices.mesh_cure(MeshSpec(data=8)):
                results = measure_all(model, on_result=_say)
        else:
            with devices.mesh_cure(spec):
                results = (measure(model, mesh=spec, keywords=keywords),)
    ok = all(result.ok for result in results)
    if as_json:
        output.show_json({"model": model, "ok": ok, "rows": [row for result in results for row in as_rows(result)]})
    elif markdown:
        typer.echo(as_markdown(results), nl=False)
    else:
        rows = [row for result in results for row in as_rows(result)]
        output.show_table(
            [column.replace("_", " ") for column in COLUMNS],
            ([as_text(row[column]) for column in COLUMNS] for row in rows),
        )
    for result in results:
        if result.no_formula:
            typer.echo(f"no formula for {result.mesh}: {result.no_formula}", err=True)
        elif not result.rows:
            typer.echo(f"nothing of more than {SMALL:,} bytes is moved on {result.mesh}", err=True)
    if not ok:
        wrong = [
            f"{row.what or 'nothing by the textbook'} ({row.kind} along {row.axes})"
            for result in results
            if not result.ok
            for row in result.rows
            if not row.ok
        ]
        typer.echo(
            f"check failed: these bytes are not the formula's: {'; '.join(wrong)} (docs/parallelism.md says for which "
            "meshes the formulas hold)",
            err=True,
        )
        raise typer.Exit(1)


def _say(result: Measured) -> None:
    """A line while the others compile."""
    verdict = "no formula" if result.no_formula else "as the formula says" if result.ok else "NOT the formula"
    typer.echo(f"{result.strategy} ({result.mesh}): {verdict}", err=True)
