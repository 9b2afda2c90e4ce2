"""`maxdiffusion generate`: pictures for a prompt from a trained run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from maxdiffusion.cli.options import Json, Mesh, VirtualDevices
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.shipped import DEFAULT_MODEL


def generate(  # noqa: PLR0913  (an argument is an option of the command line)
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='What to see, such as "a red apple, flat style".')],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe of the training, such as quantization=int8."),
    ] = None,
    place: Annotated[
        str,
        typer.Option(
            "--from", metavar="RUN[@STEP]", help="Folder that `train` wrote, such as runs/NAME, or a packaged model."
        ),
    ] = DEFAULT_MODEL,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Same seed, same pictures.")] = 0,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="Number of pictures.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write them.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps of the solver.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance-scale", help="How closely to follow the prompt; 1 is no guidance.")
    ] = None,
    solver: Annotated[str | None, typer.Option("--solver", help="Name of the solver, such as euler.")] = None,
    mesh: Mesh = None,
    virtual_devices: VirtualDevices = None,
    as_json: Json = False,
) -> None:
    """Make pictures with a trained model: PNG files that carry their prompt, seed and versions.

    The mesh is not that of the training: without --mesh every device there is takes its share of the pictures.
    """
    from maxdiffusion.cli import devices, output
    from maxdiffusion.pipelines.checkpoint_folder import recipe_at, split_place

    changes = list(changes or ())
    text = _one_prompt([prompt, *(word for word in changes if "=" not in word)])
    words = [f"mesh={mesh or 'null'}", f"virtual_devices={virtual_devices or 'null'}"]
    options = {"steps": steps, "guidance_scale": guidance_scale, "solver": solver}
    words += [f"sample.{name}={value}" for name, value in options.items() if value is not None]
    recipe = recipe_at(*split_place(place), [*words, *changes])
    devices.make_virtual_devices(recipe.virtual_devices)
    from maxdiffusion.pipelines.generate import generate_from_run

    with output.reserved(), devices.mesh_cure(recipe.mesh_spec):
        result = generate_from_run(place, text, recipe=recipe, seed=seed, num_images=num, out=out)
    output.show_result(result, as_json=as_json)


def _one_prompt(words: Sequence[str]) -> str:
    """The prompt, which the shell hands over as one word where it is quoted.

    Raises:
        UsageError: it is not, or it is empty.
    """
    if len(words) > 1:
        quoted = '"' + " ".join(words).replace('"', '\\"') + '"'
        raise UsageError(f"the prompt came as {len(words)} words: put it in quotes: maxdiffusion generate {quoted}")
    if not words[0].strip():
        raise UsageError('the prompt is empty: say what to see, such as maxdiffusion generate "a fox, noto style"')
    return words[0]
