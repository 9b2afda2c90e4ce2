"""`maxdiffusion verify`: whether a mesh and its settings give the numbers of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from maxdiffusion.cli.options import Json, MeshAxes, Rules, VirtualDevices, check_name, mesh_spec

if TYPE_CHECKING:
    from maxdiffusion.tools.verify import Cell

COLUMNS = (
    "attention",
    "context",
    "pipeline",
    "dtype",
    "remat",
    "scan",
    "text",
    "quantised",
    "furthest",
    "error",
    "limit",
    "ok",
)
"""Of the table: a setting, then what came of it."""


def verify(
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, such as flux-dev.")],
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="SIZES", help="Devices on each mesh axis, such as data=4,tensor=2.")
    ],
    mesh_axes: MeshAxes = None,
    rules: Rules = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Every combination of settings; else a set in which each pair of values occurs."),
    ] = False,
    virtual_devices: VirtualDevices = None,
    as_json: Json = False,
) -> None:
    """Compare a model's tiny twin on a mesh with one device: forward, gradients, and ten steps of training.

    Exit status is 1 when a figure is beyond its limit.
    """
    from typing import get_args

    from maxdiffusion.cli import devices, output
    from maxdiffusion.config.schema import ModelName, RulePreset

    check_name("--model", model, get_args(ModelName))
    check_name("--rules", rules, get_args(RulePreset))
    spec = mesh_spec(mesh, mesh_axes)
    devices.make_virtual_devices(virtual_devices)
    from maxdiffusion.tools.verify import as_row
    from maxdiffusion.tools.verify import verify as run

    progress = _Progress(model)
    with output.reserved(), devices.mesh_cure(spec):
        result = run(
            model, mesh=spec, logical_axis_rules=rules, every=every, on_start=progress.start, on_cell=progress.cell
        )
    if as_json:
        cells = [as_row(cell) for cell in result.cells]
        said = {"model": result.model, "mesh": result.mesh, "twin": result.twin, "ok": result.ok}
        output.show_json({**said, "cells": cells})
    else:
        output.show_table(COLUMNS, map(_cells, result.cells))
    if not result.ok:
        wrong = sum(not cell.ok for cell in result.cells)
        typer.echo(
            f"check failed: {wrong} of {len(result.cells)} settings do not give the numbers of one device", err=True
        )
        raise typer.Exit(1)


class _Progress:
    """Says how far it is, on standard error."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._total = self._done = 0

    def start(self, total: int, mesh: str, twin: str) -> None:
        """Before the first setting."""
        self._total = total
        if twin:
            typer.echo(f"verify: for the stages of {mesh} the twin of {self._model} has {twin}", err=True)
        typer.echo(
            f"verify: the twin of {self._model} on {mesh}, {total} settings: each compiles it for the mesh, and the "
            "first of a dtype and text for one device as well; ten to twenty seconds a program on two idle cores",
            err=True,
        )

    def cell(self, cell: Cell) -> None:
        """After each."""
        self._done += 1
        named = ", ".join(f"{name} {value}" for name, value in list(zip(COLUMNS, _cells(cell), strict=True))[:8])
        typer.echo(
            f"{self._done} of {self._total}: {named}: {cell.quantity} {cell.error:.1e} of {cell.limit:.0e}"
            f"{'' if cell.ok else ', BEYOND its limit'} ({cell.seconds:.0f} s)",
            err=True,
        )


def _cells(cell: Cell) -> tuple[str, ...]:
    one = cell.setting
    named = (one.attention, one.context, one.pipeline, one.dtype, one.remat, "scanned" if one.scan else "unrolled")
    named = (*named, "padded" if one.masked else "whole", one.quantization)
    return (*named, cell.quantity, f"{cell.error:.1e}", f"{cell.limit:.0e}", "yes" if cell.ok else "NO")
