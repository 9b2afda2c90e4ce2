"""From a recipe's name and `key=value` words to a checked `Recipe` whose every value knows where it came from."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.config import dialect, old_keys
from maxdiffusion.config.schema import (
    LIST,
    MAPPINGS,
    SECTIONS,
    FieldError,
    IdleError,
    Recipe,
    key_annotations,
    mesh_sizes,
)
from maxdiffusion.errors import MaxDiffusionWarning, UsageError, nearest
from maxdiffusion.paths import as_path
from maxdiffusion.specs import QUANT_KEYWORDS

RUN_RECIPE = "recipe.yaml"
"""Name of the file in a run's folder that holds its whole recipe."""

COMMAND_LINE = "command line"


class Entry(NamedTuple):
    """A value as written, and where."""

    value: Any
    origin: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A checked recipe.

    Attributes:
        name: the recipe's name, or the stem of its file.
        recipe: its values.
        origins: where each full key was set (`pictures.yaml:7`, `command line`); a key that is missing has its default.
    """

    name: str
    recipe: Recipe
    origins: Mapping[str, str]


def recipe_names() -> dict[str, str]:
    """The built-in recipes with their descriptions, which are the first comment line of each file."""
    found = {}
    for path in sorted(_folder().glob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Reads a recipe, what it extends, and the words of the command line; then checks everything at once.

    Args:
        source: name of a built-in recipe, or path of a YAML file.
        overrides: `key=value` words, values as YAML; later ones win over earlier ones and over every file.

    Raises:
        UsageError: an unknown recipe, key or value; one line for each, with its origin and the nearest valid name.
    """
    path, label = _locate(str(source), base=None)
    return _load(path, label, path.stem, overrides)


def load_run(run: str | Path, overrides: Sequence[str] = (), *, otherwise: str = "") -> LoadedRecipe:
    """The recipe that a run was trained with, from its folder.

    An older version may have written values that do nothing and are refused now: they are left out.

    Args:
        run: the run's folder.
        overrides: `key=value` words that change it.
        otherwise: what can be done without a run, for the message where there is none.

    Raises:
        UsageError: no such folder, or it holds no recipe.

    Warns:
        MaxDiffusionWarning: a value is left out.
    """
    folder = as_path(run)
    if not folder.is_dir():
        siblings = [entry.name for entry in folder.parent.glob("*") if (entry / RUN_RECIPE).is_file()]
        hint = nearest(folder.name, siblings) if siblings else "train one first: maxdiffusion train RECIPE"
        more = f" ({otherwise})" if otherwise else ""
        raise UsageError(f"there is no run '{run}': {hint}{more}")
    if not (folder / RUN_RECIPE).is_file():
        raise UsageError(f"'{run}' is no run: it has no {RUN_RECIPE}; give the folder that `maxdiffusion train` wrote")
    path = folder / RUN_RECIPE
    return _load(path, str(path), folder.resolve().name, overrides, drops_idle=True)


def format_value(value: Any) -> str:
    """A value as it is written in a recipe, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def _quoted(item: Any) -> str:
    text = format_value(item)
    return f'"{text}"' if isinstance(item, str) and any(mark in text for mark in ",:[]{}#") else text


def _load(path: Path, label: str, name: str, overrides: Sequence[str], *, drops_idle: bool = False) -> LoadedRecipe:
    entries = _read(path, label, chain=())
    if drops_idle:
        _drop_idle(entries)
    problems = []
    for word in overrides:
        try:
            _merge(entries, _override(word))
        except UsageError as error:
            problems.append(str(error))
    if drops_idle:
        _drop_of_other_mode(entries)
    return _check(name, entries, problems)


def _drop_of_other_mode(entries: dict[str, Entry]) -> None:
    """Takes settings of a run's quantisation out that the mode on the command line has no use for.

    Warns:
        MaxDiffusionWarning: for each of them.
    """
    mode = entries.get("quantization")
    if mode is None or mode.origin != COMMAND_LINE:
        return
    precise = ("sample.precise_first_steps", "sample.precise_last_steps")
    idle: dict[Any, tuple[str, ...]] = {
        None: ("use_qwix_quantization", *QUANT_KEYWORDS.values(), *precise),
        "int4": (QUANT_KEYWORDS["activations"], QUANT_KEYWORDS["gradients"], *precise),
        "int8": (QUANT_KEYWORDS["gradients"],),
        "fp8": (QUANT_KEYWORDS["gradients"],),
    }
    for key in idle.get(mode.value, ()):
        entry = entries.get(key)
        if entry is None or entry.origin == COMMAND_LINE:
            continue
        del entries[key]
        section, _, name = key.rpartition(".")
        if entry.value != getattr(SECTIONS[section] if section else Recipe, name):
            text = f"{key}={format_value(entry.value)} ({entry.origin}) is of no use with quantization=" + (
                f"{format_value(mode.value)} and is left out"
            )
            warnings.warn(MaxDiffusionWarning(text), stacklevel=3)


def _drop_idle(entries: dict[str, Entry]) -> None:
    """Takes the values out that do nothing beside the others.

    Warns:
        MaxDiffusionWarning: for each of them.
    """
    for section, cls in SECTIONS.items():
        while True:
            own = {key: entry for key, entry in entries.items() if key.partition(".")[0] == section}
            try:
                cls(**{key.partition(".")[2]: entry.value for key, entry in own.items()})
                break
            except ValidationError as error:
                causes = [item.get("ctx", {}).get("error") for item in error.errors()]
            key = next((f"{section}.{cause.key}" for cause in causes if isinstance(cause, IdleError)), None)
            if key not in own:
                break  # what else is wrong is said by the check of the whole
            entry = entries.pop(key)
            text = f"{key}={format_value(entry.value)} ({entry.origin}) does nothing there and is left out"
            warnings.warn(MaxDiffusionWarning(text), stacklevel=3)


def _folder() -> Path:
    return Path(str(importlib.resources.files("maxdiffusion"))) / "recipes"


def _locate(source: str, base: Path | None) -> tuple[Path, str]:
    """Path of a recipe and how messages call it; a relative path starts at `base`'s folder, or where the user is."""
    if source.endswith((".yaml", ".yml")) or "/" in source or "\\" in source:
        path = base.parent / source if base else Path(source)
        if path.is_dir():
            raise UsageError(f"recipe '{source}' is a folder: give a file that ends in .yaml")
        if not path.is_file():
            raise UsageError(f"recipe '{source}': there is no file {path}")
        return path, path.name if path.parent == _folder() else str(path)
    path = _folder() / f"{source}.yaml"
    if not path.is_file():
        raise UsageError(f"recipe '{source}' is unknown: {nearest(source, recipe_names())} (a file ends in .yaml)")
    return path, path.name


def _read(path: Path, label: str, chain: tuple[Path, ...]) -> dict[str, Entry]:
    """Entries of a file on top of those of the file that it extends."""
    resolved = path.resolve()
    if resolved in chain:
        circle = " -> ".join(step.name for step in (*chain[chain.index(resolved) :], resolved))
        raise UsageError(f"{label}: `extends` goes round in a circle: {circle}")
    try:
        document = dialect.parse(path.read_text(encoding="utf-8"), label)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {label} cannot be read: {error}") from error
    if document is None:
        document = dialect.Mapping(())
    if not isinstance(document, dialect.Mapping):
        raise UsageError(f"{label}: a recipe is a mapping of keys to values, such as `model: pictures`")
    own: dict[str, Entry] = {}
    parent: dict[str, Entry] = {}
    for key, line, value in document.entries:
        if key == "extends":
            if not isinstance(value, str):
                raise UsageError(f"{label}:{line}: extends={format_value(value)}: write the name of one recipe")
            parent = _read(*_locate(value, base=path), chain=(*chain, resolved))
            continue
        for full, entry in _flat(key, value, f"{label}:{line}", label):
            if full in own:
                raise UsageError(f"{entry.origin}: '{full}' is given twice (first at {own[full].origin}): keep one")
            own[full] = entry
    _merge(parent, own)
    return parent


def _flat(key: str, value: Any, origin: str, label: str) -> list[tuple[str, Entry]]:
    """Full keys of what is written under `key`: sections and mappings are opened, other values left whole."""
    opened = key in SECTIONS or key in MAPPINGS or key == "mesh.dcn"
    if isinstance(value, dialect.Mapping) and opened:
        pairs = []
        for inner, line, item in value.entries:
            where = f"{label}:{line}" if label != COMMAND_LINE else origin
            pairs += _flat(f"{key}.{inner}", item, where, label)
        return pairs
    if value is None and key in SECTIONS:
        return []
    if isinstance(value, dialect.Mapping):
        value = value.plain()
    return [(key, Entry(value, origin))]


def _override(word: str) -> dict[str, Entry]:
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals or not key:
        hint = f"; options start with --: --{key}" if key in ("json", "print-config", "virtual-devices") else ""
        raise UsageError(f"'{word}' is not key=value: write for example train.steps=100{hint}")
    # A mesh written as data=4,tensor=2 and a prompt with a colon are texts, not mappings.
    value = text.strip() if key == "mesh" and "=" in text else dialect.parse(text, f"{key}={text}")
    if isinstance(value, dialect.Mapping) and not text.lstrip().startswith("{"):
        value = text.strip()
    return dict(_flat(key, value, COMMAND_LINE, COMMAND_LINE))


def _merge(entries: dict[str, Entry], newer: Mapping[str, Entry]) -> None:
    """Puts newer entries over older ones; a mapping written whole as text or null removes its older names."""
    for key, entry in newer.items():
        if key not in MAPPINGS:
            entries[key] = entry
            continue
        for old in [old for old in entries if old.startswith(f"{key}.")]:
            del entries[old]
        entries.update(_open(key, entry))


def _open(key: str, entry: Entry) -> dict[str, Entry]:
    """A mapping written whole, name by name."""
    if entry.value is None:
        return {}
    if key != "mesh" or not isinstance(entry.value, str):
        example = {"mesh": "mesh=data=4,tensor=2", "flash_block_sizes": "flash_block_sizes.block_q=128"}
        cure = example.get(key, "model_config.NAME=VALUE")
        raise UsageError(
            f"{key}={format_value(entry.value)} ({entry.origin}): it holds names; write for example {cure}"
        )
    try:
        sizes = mesh_sizes(entry.value)
    except UsageError as error:
        raise UsageError(f"mesh={entry.value} ({entry.origin}): {error}") from error
    opened = {f"mesh.{name}": Entry(size, entry.origin) for name, size in sizes.items() if name != "dcn"}
    return opened | {f"mesh.dcn.{name}": Entry(size, entry.origin) for name, size in sizes.get("dcn", {}).items()}


def _check(name: str, entries: dict[str, Entry], problems: list[str]) -> LoadedRecipe:
    known = dict(key_annotations())
    axes = entries["mesh_axes"].value if "mesh_axes" in entries else Recipe.mesh_axes
    valid = [key for key in known if key not in ("mesh", "flash_block_sizes", "model_config")]
    if isinstance(axes, tuple):
        valid += [f"mesh.{axis}" for axis in axes] + [f"mesh.dcn.{axis}" for axis in axes]
    valid += [f"flash_block_sizes.{field.name}" for field in dataclasses.fields(BlockSizes)]
    values: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for key, entry in entries.items():
        head, _, tail = key.partition(".")
        if key not in valid and not (head == "model_config" and tail):
            problems.append(_unknown(key, entry, valid))
        elif head == "mesh" and tail.startswith("dcn."):
            values[""].setdefault("mesh", {}).setdefault("dcn", {})[tail[4:]] = entry.value
        elif head in MAPPINGS:
            values[""].setdefault(head, {})[tail] = entry.value
        else:
            values[head if tail else ""][tail or head] = entry.value
    built = {}
    for section, cls in SECTIONS.items():
        built[section] = _build(cls, section, values[section], entries, problems)
    if values[""].get("run") is None:
        values[""]["run"] = f"runs/{name}"
    recipe = _build(Recipe, "", {**values[""], **{key: part for key, part in built.items() if part}}, entries, problems)
    if problems or not isinstance(recipe, Recipe):
        raise UsageError("\n".join(dict.fromkeys(problems)))
    return LoadedRecipe(name=name, recipe=recipe, origins={key: entry.origin for key, entry in entries.items()})


def _build(cls: type, section: str, values: dict[str, Any], entries: dict[str, Entry], problems: list[str]) -> Any:
    """The section, or None after noting what is wrong with its values."""
    try:
        return cls(**values)
    except ValidationError as error:
        items = {_place(item, section, entries): item for item in reversed(error.errors())}
    known = dict(key_annotations())
    for key, item in reversed(items.items()):
        if any(other.startswith(f"{key}.") for other in items):  # one branch of a union; the other says where
            continue
        where = dict.fromkeys(e.origin for k, e in entries.items() if k == key or k.startswith(f"{key}."))
        origin = f" ({', '.join(where)})" if where else ""
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            problems.append(f"{key}{origin}: {getattr(cause, 'cause', cause)}")
            continue
        value = entries[key].value if key in entries else values.get(key)
        shown = repr(value) if isinstance(value, str) else format_value(value)
        annotation = known[key if key in known else key.partition(".")[0]]
        problems.append(f"{key}={shown}{origin}: {_allowed(annotation, value)}")
    return None


def _place(item: Any, section: str, entries: Mapping[str, Entry]) -> str:
    """Full key that an error of pydantic is about."""
    cause = item.get("ctx", {}).get("error")
    name = cause.key if isinstance(cause, FieldError) else item["loc"][0]
    key = f"{section}.{name}" if section else str(name)
    parts = {*key.split("."), *map(str, item["loc"])}
    deeper = [place for place in entries if place.startswith(f"{key}.") and parts.issuperset(place.split("."))]
    return max(deeper, key=len, default=key)


def _unknown(key: str, entry: Entry, valid: Sequence[str]) -> str:
    """The line about a key that a recipe does not have, with the nearest one that it has."""
    head, _, tail = key.rpartition(".")
    old = old_keys.advice(key, format_value(entry.value) if isinstance(entry.value, tuple) else entry.value)
    if old:
        return f"{key} ({entry.origin}) {old}"
    inside = [name for name in valid if name.startswith(f"{key}.")]
    if inside:
        value = format_value(entry.value)
        return f"{key}={value} ({entry.origin}): it holds names; write for example {inside[0]}=VALUE"

    if head == "mesh":
        axes = [name for name in valid if name.startswith("mesh.") and not name.startswith("mesh.dcn.")]
        other = ",".join(["data", tail] if tail != "data" else ["data"])
        near = [
            f"mesh.{name}" for name in difflib.get_close_matches(tail, [name.removeprefix("mesh.") for name in axes], 1)
        ]
        told = (
            f"did you mean '{near[0]}'?"
            if near
            else f"valid: {', '.join(axes)} (or name other axes: mesh_axes=[{other}])"
        )
        return f"{key} ({entry.origin}) is unknown: {told}"

    def likeness(option: str) -> float:
        """Ratio of the last names where the section is the same or left out; elsewhere more must agree."""
        place, _, name = option.rpartition(".")
        near = head in ("", place)
        begins = near and len(tail) > 2 and name.startswith(tail)
        names = difflib.SequenceMatcher(None, tail, name).ratio() + 0.2 * begins
        if tail == "".join(word[0] for word in name.split("_")):
            names = 0.9  # lr, bs, wd
        whole = difflib.SequenceMatcher(None, key, option).ratio()
        return max(whole - 0.2, names if near else names - 0.25)

    best = max(valid, key=likeness)
    if likeness(best) >= 0.6:
        return f"{key} ({entry.origin}) is unknown: did you mean '{best}'?"
    near = [name for name in valid if head and name.rpartition(".")[0] == head]
    names = near or [*SECTIONS, *MAPPINGS, *(name for name in valid if "." not in name)]
    return f"{key} ({entry.origin}) is unknown: valid: {', '.join(names)}"


def _allowed(annotation: Any, value: Any) -> str:
    """What may stand there, from the annotation of the key."""
    if get_origin(annotation) is Literal:
        options = [str(option) for option in get_args(annotation)]
        return nearest(value, options) if isinstance(value, str) else f"valid: {', '.join(options)}"
    if get_origin(annotation) is Annotated:
        text = next((meta.description for meta in get_args(annotation)[1:] if isinstance(meta, FieldInfo)), None)
        return f"write a list: [{value}]" if isinstance(value, str) and text == LIST else f"write {text}"
    options = get_args(annotation)
    inner = next((option for option in options if option is not type(None)), None)
    null = " (or null)" if type(None) in options else ""
    return _allowed(inner, value) + null if inner is not None else "write another kind of value"
