"""`maxdiffusion train`: a recipe, changed by `key=value` words, becomes a run."""

from __future__ import annotations

from typing import Annotated

import typer

from maxdiffusion.cli.options import Coordinator, HostId, HostTimeout, Json, NumHosts, VirtualDevices
from maxdiffusion.errors import INTERRUPTED


def train(  # noqa: PLR0913  each is an option
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Name of a recipe (see `maxdiffusion recipes`) or a .yaml file.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as train.steps=100 mesh.data=4."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every value and where it was set, then stop.")
    ] = False,
    as_json: Json = False,
    virtual_devices: VirtualDevices = None,
    coordinator: Coordinator = None,
    num_hosts: NumHosts = None,
    host_id: HostId = None,
    host_timeout: HostTimeout = 100,
) -> None:
    """Train a model. Ctrl-C and SIGTERM save and stop, with exit status 130."""
    from maxdiffusion.cli import devices, hosts, output
    from maxdiffusion.config import show
    from maxdiffusion.config.load import load_recipe

    words = list(changes or ())
    if virtual_devices is not None:
        words.append(f"virtual_devices={virtual_devices}")
    loaded = load_recipe(recipe, words)
    if print_config:
        if as_json:
            output.show_json(show.as_json(loaded))
        else:
            output.show_table(show.Row._fields, show.rows(loaded))
        return
    hosts.join_others(
        coordinator=coordinator,
        num_hosts=num_hosts,
        host_id=host_id,
        host_timeout=host_timeout,
        virtual=loaded.recipe.virtual_devices,
    )
    devices.make_virtual_devices(loaded.recipe.virtual_devices)
    from maxdiffusion.train.run import train as run

    several = hosts.joined()
    with output.reserved_from_libraries() if several else output.reserved(), devices.mesh_cure(loaded.recipe.mesh_spec):
        result = run(loaded.recipe, host_timeout=host_timeout)
    if not several or hosts.is_first():
        output.show_result(result, as_json=as_json)
    if result.interrupted:
        hosts.leave_together()
        raise typer.Exit(INTERRUPTED)
