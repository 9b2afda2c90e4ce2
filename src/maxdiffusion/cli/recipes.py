"""`maxdiffusion recipes`: the recipes that come with the library."""

from __future__ import annotations

from maxdiffusion.cli.options import Json


def recipes(as_json: Json = False) -> None:
    """List the built-in recipes."""
    from maxdiffusion.cli import output
    from maxdiffusion.config.load import recipe_names

    found = recipe_names()
    if as_json:
        output.show_json({"recipes": [{"name": name, "description": text} for name, text in found.items()]})
    else:
        output.show_table(["recipe", "what it does"], found.items())
