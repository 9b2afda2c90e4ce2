"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
]
Mesh: TypeAlias = Annotated[
    str | None, typer.Option("--mesh", metavar="SIZES", help="Devices on each mesh axis, such as data=4,tensor=2.")
]
Run: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `train` wrote, such as runs/NAME.")]
VirtualDevices: TypeAlias = Annotated[
    int | None,
    typer.Option("--virtual-devices", metavar="N", min=1, help="Split the CPU into N devices, to try a mesh."),
]
