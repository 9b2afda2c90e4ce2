"""YAML as recipes use it: `1e-4` is a number, only `true` and `false` are truth values, and values know their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from maxdiffusion.errors import UsageError

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAGS = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}


class _Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2: no `yes`, no octal `010`, no dates, no base 60."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same values."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Texts with rare line breaks are escaped: PyYAML writes these wrongly when it does not quote them."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _name, _pattern in _TAGS.items():
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _whole, None)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _whole, None)


@dataclass(frozen=True)
class Mapping:
    """A YAML mapping before it is checked.

    Attributes:
        entries: (key, line, value) in the order written; a value is a plain value or again a `Mapping`.
    """

    entries: tuple[tuple[str, int, Any], ...]

    def plain(self) -> dict[str, Any]:
        """The same as dicts, without lines."""
        return {key: value.plain() if isinstance(value, Mapping) else value for key, _, value in self.entries}


def parse(text: str, origin: str) -> Any:
    """The value of one YAML document; sequences become tuples, mappings `Mapping`.

    Args:
        text: the document.
        origin: name of the file or argument, for messages.

    Raises:
        UsageError: the text is not YAML, or a key is given twice in one mapping.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, origin)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}:{mark.line + 1}" if mark and "\n" in text.strip() else origin
        raise UsageError(f"{where}: this is not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{origin}: this is not valid YAML: {str(error).splitlines()[0]}") from error


def dump(values: dict[str, Any]) -> str:
    """YAML text that `parse` reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _value(loader: _Loader, node: yaml.Node, origin: str) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = [_value(loader, item, origin) for item in node.value]
        return tuple(item.plain() if isinstance(item, Mapping) else item for item in items)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        entries = []
        for key_node, value_node in node.value:
            key, line = str(getattr(key_node, "value", key_node)), key_node.start_mark.line + 1
            if key in lines:
                raise UsageError(f"{origin}:{line}: '{key}' is given twice (first on line {lines[key]}): keep one")
            lines[key] = line
            entries.append((key, line, _value(loader, value_node, origin)))
        return Mapping(tuple(entries))
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() == "true"
    if node.tag == "tag:yaml.org,2002:int":
        return int(node.value)
    if node.tag == "tag:yaml.org,2002:float":
        text = node.value.lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return str(node.value)
