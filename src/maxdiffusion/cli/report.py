"""`maxdiffusion report`: the page about a run, made anew; reads files only and needs no device."""

from __future__ import annotations

from typing import Annotated

import typer

from maxdiffusion.cli.options import Json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder that `train` wrote, such as runs/NAME.")],
    as_json: Json = False,
) -> None:
    """Write RUN/report.html: losses, speed, memory, samples over time, the recipe; one file that needs no network."""
    from maxdiffusion.cli import output
    from maxdiffusion.pipelines.shipped import refuse_shipped
    from maxdiffusion.train.report import write_report

    refuse_shipped(run)
    path = write_report(run)
    if as_json:
        output.show_json({"report": path})
    else:
        typer.echo(f"report: {path}")
