"""Options that several verbs share, and the names that they take."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from maxdiffusion.errors import MeshError, UsageError, nearest

if TYPE_CHECKING:
    from maxdiffusion.specs import MeshSpec

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
]
Coordinator: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--coordinator", "--coordinator-address", metavar="HOST:PORT", help="Where host 0 is, for several hosts."
    ),
]
HostId: TypeAlias = Annotated[
    int | None, typer.Option("--host-id", "--process-id", metavar="I", help="Number of this host, from 0.")
]
HostTimeout: TypeAlias = Annotated[
    int,
    typer.Option(
        "--host-timeout", metavar="SECONDS", min=5, help="Without a sign of life for so long, a host counts as gone."
    ),
]
Mesh: TypeAlias = Annotated[
    str | None, typer.Option("--mesh", metavar="SIZES", help="Devices on each mesh axis, such as data=4,tensor=2.")
]
MeshAxes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--mesh-axes", metavar="NAMES", help="Other names of the mesh axes, outermost first, such as data,model."
    ),
]
NumHosts: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--num-hosts",
        "--num-processes",
        metavar="N",
        help="Processes that train together; 1 trains alone whatever Slurm, MPI or Kubernetes say.",
    ),
]
Run: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `train` wrote, such as runs/NAME.")]
Rules: TypeAlias = Annotated[
    str | None, typer.Option("--rules", metavar="PRESET", help="dp, fsdp, tp, fsdp_tp, hsdp or context.")
]
VirtualDevices: TypeAlias = Annotated[
    int | None,
    typer.Option("--virtual-devices", metavar="N", min=1, help="Split the CPU into N devices, to try a mesh."),
]


def mesh_spec(mesh: str, mesh_axes: str | None) -> MeshSpec:
    """The sizes that `--mesh` gives to the usual mesh axes, or to those of `--mesh-axes`.

    Raises:
        MeshError: names or sizes that cannot be.
    """
    from maxdiffusion.specs import MESH_AXES, MeshSpec, names_in

    if not mesh.strip(" ,"):
        raise MeshError("--mesh is empty: write for example --mesh data=4,tensor=2")
    try:
        return MeshSpec.parse(mesh, axes=MESH_AXES if mesh_axes is None else names_in(mesh_axes))
    except MeshError as error:
        written = [part.partition("=")[0].strip().removeprefix("dcn.") for part in mesh.split(",") if "=" in part]
        if mesh_axes is None and not set(written) <= set(MESH_AXES):
            raise MeshError(f"{error} (or name other axes: --mesh-axes {','.join(dict.fromkeys(written))})") from None
        raise


def check_name(option: str, value: str | None, valid: Collection[str]) -> None:
    """Refuses a name that an option does not know; None, an option that was not given, passes.

    Raises:
        UsageError: with the nearest name.
    """
    if value is not None and value not in valid:
        raise UsageError(f"{option} {value} is unknown: {nearest(value, valid)}")
