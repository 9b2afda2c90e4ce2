"""`maxdiffusion evaluate`: figures that say what a trained run has learnt."""

from __future__ import annotations

import typer

from maxdiffusion.cli.options import Json, Mesh, Run, VirtualDevices


def evaluate(run: Run, mesh: Mesh = None, virtual_devices: VirtualDevices = None, as_json: Json = False) -> None:
    """Measure a trained model on pictures that it never saw, on the mesh of its training if no other is given.

    Exit status is 1 when the figures do not show that it learnt: chance, or no gain by captions, lies in an interval.
    """
    from maxdiffusion.cli import devices, output
    from maxdiffusion.config.load import load_run
    from maxdiffusion.pipelines.shipped import refuse_shipped

    refuse_shipped(run)
    words = [f"mesh={mesh}"] if mesh else []
    if virtual_devices is not None:
        words.append(f"virtual_devices={virtual_devices}")
    recipe = load_run(run, words).recipe
    devices.make_virtual_devices(recipe.virtual_devices)
    from maxdiffusion.train.evaluate import evaluate_run

    with output.reserved(), devices.mesh_cure(recipe.mesh_spec):
        result = evaluate_run(run, recipe=recipe)
    output.show_result(result, as_json=as_json)
    if not result.learned:
        typer.echo("check failed: the figures do not tell this model from chance; train longer", err=True)
        raise typer.Exit(1)
