"""`maxdiffusion ckpt`: what checkpoints a run has, and what is in one; reads files only and needs no device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maxdiffusion.cli.options import Json

if TYPE_CHECKING:
    from maxdiffusion.tools.checkpoints import Described

app = typer.Typer(no_args_is_help=True, help="List and describe checkpoints, on any machine.")


@app.command("ls")
def list_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder that `train` wrote, such as runs/NAME.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, and whether each is whole.

    Exit status is 1 when one of them is not.
    """
    from maxdiffusion.cli import output
    from maxdiffusion.pipelines.shipped import refuse_shipped
    from maxdiffusion.tools.checkpoints import list_checkpoints

    refuse_shipped(run)
    found, unfinished = list_checkpoints(run)
    if as_json:
        output.show_json({"run": run, "checkpoints": [_summary(one) for one in found], "unfinished": unfinished})
    else:
        columns = ("step", "age", "size", "parts", "parameters", "dtypes", "written on", "whole")
        output.show_table(columns, [_row(one) for one in found])
        for step in unfinished:
            typer.echo(f"step {step} was begun and is not finished: training writes it now, or died while it did")
    if any(one.flaw for one in found):
        raise typer.Exit(1)


@app.command("show")
def show_one(
    place: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A run (its newest), a step of it, or a checkpoint's folder.")
    ],
    every: Annotated[bool, typer.Option("--all", help="Show every array.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: parts, arrays, mesh, rules, data position, versions.

    Exit status is 1 when it is not whole.
    """
    from maxdiffusion.cli import output
    from maxdiffusion.pipelines.shipped import refuse_shipped
    from maxdiffusion.tools.checkpoints import describe_folder, find_checkpoint

    refuse_shipped(place)
    found = describe_folder(find_checkpoint(place))
    if as_json:
        output.show_json({**_summary(found), "manifest": found.manifest})
    else:
        output.show_table(("checkpoint", "value"), _facts(found))
        typer.echo()
        rows = [
            (part.name, _size(part.bytes), _number(part.arrays), _number(part.elements), _counts(part.dtypes))
            for part in found.parts
        ]
        output.show_table(("part", "size", "arrays", "elements", "dtypes"), rows)
        if every and found.manifest:
            typer.echo()
            output.show_table(("array", "dtype", "shape", "mesh axes"), _arrays(found.manifest))
    if found.flaw:
        raise typer.Exit(1)


def _summary(found: Described) -> dict[str, Any]:
    return {
        "step": found.step,
        "folder": str(found.folder),
        "whole": found.flaw is None,
        "flaw": found.flaw,
        "note": found.note,
        "written": found.written,
        "age_seconds": max(time.time() - found.written, 0.0),
        "bytes": found.bytes,
        "parts": {
            part.name: {
                "bytes": part.bytes,
                "arrays": part.arrays,
                "elements": part.elements,
                "dtypes": dict(part.dtypes),
            }
            for part in found.parts
        },
        "parameters": found.parameters,
        "dtypes": found.dtypes,
        "mesh": found.mesh,
    }


def _row(found: Described) -> tuple[Any, ...]:
    return (
        "?" if found.step is None else found.step,
        _age(found.written),
        _size(found.bytes),
        ", ".join(part.name for part in found.parts),
        _number(found.parameters),
        _counts(found.dtypes),
        found.mesh or "?",
        _whole(found),
    )


def _facts(found: Described) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("folder", found.folder),
        ("step", "?" if found.step is None else found.step),
        ("whole", _whole(found)),
        ("written", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found.written))} ({_age(found.written)} ago)"),
        ("size", _size(found.bytes)),
        ("parameters", _number(found.parameters)),
        ("written on", found.mesh or "?"),
    ]
    manifest = found.manifest or {}
    if "model" in manifest:
        data, start = manifest["data"], manifest.get("started_from")
        rows += [
            ("model", manifest["model"]),
            *([("started from", f"{start['place']}, step {start['step']}")] if start else []),
            (
                "data",
                f"sample {data['next_sample']} is next, in epoch {data['epoch']} of {data['num_samples']} samples",
            ),
            *[("", line) for line in _buckets(data.get("buckets", ()))],
            ("seed, batch size", f"{data['seed']}, {data['batch_size']}"),
            ("rules", ", ".join(f"{name}: {_axes(axes)}" for name, axes in manifest["rules"] if axes)),
        ]
    if "versions" in manifest:
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())))
    return rows


def _buckets(buckets: Any) -> list[str]:
    """How far each size of pictures is drawn, where there are several."""
    return [
        "{} x {}: {} of {} drawn in epoch {}".format(*one["size"], one["place"], one["samples"], one["epoch"])
        for one in buckets
        if len(buckets) > 1
    ]


def _arrays(manifest: Any) -> list[tuple[str, ...]]:
    return [
        (f"{part}/{name}", leaf["dtype"], str(leaf["shape"]), " ".join(_axes(axes) or "-" for axes in leaf["axes"]))
        for part, leaves in manifest["parts"].items()
        for name, leaf in leaves.items()
    ]


def _axes(axes: Any) -> str:
    return "+".join(axes) if isinstance(axes, list) else str(axes or "")


def _whole(found: Described) -> str:
    if found.flaw is not None:
        return f"no: {found.flaw}"
    return f"yes, {found.note}" if found.note else "yes"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{dtype} ({number})" for dtype, number in counts.items()) or "?"


def _size(number: int) -> str:
    size, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def _age(written: float) -> str:
    seconds = max(time.time() - written, 0.0)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
