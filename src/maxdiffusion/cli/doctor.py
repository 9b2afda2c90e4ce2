"""`maxdiffusion doctor`: what is wrong with this installation and this machine, and what cures it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maxdiffusion.cli.options import Json

SIGNS = {"ok": "ok", "note": "note", "broken": "BROKEN"}


def doctor(
    run: Annotated[Path, typer.Option("--run", metavar="FOLDER", help="A folder that a run would write to.")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """Examine the installation, the devices and the environment. Exit status 1 where something is broken."""
    from maxdiffusion.cli import output
    from maxdiffusion.tools.doctor import examine, this_machine

    findings = examine(this_machine(run))
    broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        output.show_json({"broken": broken, "findings": findings})
    else:
        rows = [(SIGNS[finding.state], finding.check, finding.found, finding.cure) for finding in findings]
        output.show_table(["", "check", "found", "cure"], rows)
    if broken:
        raise typer.Exit(1)
