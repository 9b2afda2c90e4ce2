"""A loaded recipe as rows of key, value and origin, and as the file that a run keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from maxdiffusion.config import dialect
from maxdiffusion.config.load import LoadedRecipe, format_value
from maxdiffusion.config.schema import Recipe, flatten

DEFAULT = "default"


class Row(NamedTuple):
    """One line of `--print-config`."""

    key: str
    value: str
    origin: str


def rows(loaded: LoadedRecipe) -> list[Row]:
    """Every key of the recipe, its value as written in a recipe, and where it was set."""
    return [
        Row(key, format_value(value), loaded.origins.get(key, DEFAULT)) for key, value in flatten(loaded.recipe).items()
    ]


def as_json(loaded: LoadedRecipe) -> dict[str, Any]:
    """The same for machines: `recipe` (its name) and `rows`, a list of `key`, `value`, `origin`."""
    return {
        "recipe": loaded.name,
        "rows": [
            {"key": key, "value": value, "origin": loaded.origins.get(key, DEFAULT)}
            for key, value in flatten(loaded.recipe).items()
        ],
    }


def as_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back as the same recipe."""
    nested: dict[str, Any] = {}
    for key, value in flatten(recipe).items():
        section, _, name = key.rpartition(".")
        place = nested
        for part in filter(None, section.split(".")):
            place = place.setdefault(part, {})
        place[name] = value
    return dialect.dump(_lists(nested))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
