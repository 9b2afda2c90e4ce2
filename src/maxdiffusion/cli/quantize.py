"""`maxdiffusion quantize`: a trained model with its weights stored quantised, or what that does to its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maxdiffusion.cli.options import Json, VirtualDevices
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.shipped import DEFAULT_MODEL

if TYPE_CHECKING:
    from maxdiffusion.pipelines.quantise import QuantReport


def quantize(  # noqa: PLR0913  (an argument is an option of the command line)
    place: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="Folder that `train` wrote, such as runs/NAME, or a packaged model."),
    ] = DEFAULT_MODEL,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to its recipe, such as quantization_exclude=[.*conv.*]."),
    ] = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="int8, fp8 or int4.")] = "int8",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the quantised model here, for `generate`.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Compare its pictures with the unquantised model's, and try each layer.")
    ] = False,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Whether --report tries each layer alone.")] = True,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="PROMPT", help="For --report; the recipe's own without any.")
    ] = None,
    virtual_devices: VirtualDevices = None,
    as_json: Json = False,
) -> None:
    """Store a trained model quantised (--out), or report what that costs its pictures (--report).

    Exit status is 1 when the pictures of --report are below the floor of the mode (int8 30 dB, fp8 25 dB).
    """
    from maxdiffusion.cli import devices, output
    from maxdiffusion.cli.options import check_name

    check_name("--mode", mode, ("int8", "fp8", "int4"))
    if (out is None) != report:
        raise UsageError("quantize does one thing at a time: give --out DIR, or --report")
    from maxdiffusion.pipelines import quantise

    if "=" in place:
        place, changes = DEFAULT_MODEL, [place, *(changes or ())]
    for change in changes or ():
        if change.partition("=")[0].strip() in ("quantization", "use_qwix_quantization"):
            raise UsageError(f"{change}: --mode says how to quantise: write --mode int8, fp8 or int4 instead")
    words = [f"quantization={mode}", f"virtual_devices={virtual_devices or 'null'}", *(changes or ())]
    recipe = quantise.quantised_recipe(place, words)
    devices.make_virtual_devices(recipe.virtual_devices)
    if out is not None:
        with output.reserved(), devices.mesh_cure(recipe.mesh_spec):
            written = quantise.quantise(place, recipe=recipe, out=out)
        output.show_result(written, as_json=as_json)
        return
    with output.reserved(), devices.mesh_cure(recipe.mesh_spec):
        found = quantise.report(
            place, recipe=recipe, prompts=prompts or (), table=table, say=lambda line: typer.echo(line, err=True)
        )
    if as_json:
        output.show_json(found)
    else:
        _show(found)
    if not found.ok:
        typer.echo(
            f"check failed: PSNR {found.psnr:.1f} dB is below {found.floor:g} dB: leave out the first layers of the "
            "table (quantization_exclude), or sample precise steps (sample.precise_first_steps)",
            err=True,
        )
        raise typer.Exit(1)


def _show(found: QuantReport) -> None:
    from maxdiffusion.cli import output

    if found.modules:
        first = f"quantised alone ({found.table_steps} steps)"
        rows = [
            (row.module, row.kernels, f"{row.psnr:.1f}", f"{row.ssim:.4f}", f"{row.features:.5f}", said)
            for row in found.modules
            for said in ["yes" if row.excluded else ""]
        ]
        output.show_table([first, "kernels", "PSNR dB", "SSIM", "features", "left out"], rows)
    floor = "" if found.floor is None else f" (at least {found.floor:g})"
    output.show_table(
        ["result", "value"],
        [
            ("mode", f"{found.mode}, {found.dtype}"),
            ("pictures", found.pictures),
            ("stored kernels", f"{found.bytes_ratio:.3f} of their bytes in bfloat16"),
            ("all weights", f"{found.model_bytes_ratio:.3f}"),
            ("PSNR", f"{found.psnr:.2f} dB{floor}"),
            ("SSIM", f"{found.ssim:.4f}"),
            ("feature distance", f"{found.features:.5f}"),
            ("seconds", f"{found.seconds:.0f}"),
        ],
    )
