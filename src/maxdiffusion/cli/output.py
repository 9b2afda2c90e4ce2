"""What goes to standard output: a table for people, or one JSON object for programs."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import numbers
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PIPE_WIDTH = 10_000
"""Columns of a table that no terminal shows: none of its lines is wrapped."""


@contextlib.contextmanager
def reserved() -> Iterator[None]:
    """Sends what code below prints to standard error, so that only a result reaches standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def reserved_from_libraries() -> Iterator[None]:
    """The same for libraries that write past Python, as gloo does when hosts connect."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with reserved():
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what is still in their buffers
        os.dup2(kept, 1)
        os.close(kept)


def show_json(value: Any) -> None:
    """Writes one JSON object: dataclasses as objects, paths as texts, numbers that are not finite as null."""
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False, ensure_ascii=False) + "\n")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell), overflow="fold") for cell in row))
    Console(file=sys.stdout, width=None if terminal else PIPE_WIDTH).print(table)


def show_result(result: Any, *, as_json: bool) -> None:
    """Writes a result dataclass: one row for each field that says anything; JSON has them all."""
    if as_json:
        show_json(result)
        return
    fields = _plain(result)
    said = {name: _cell(value) for name, value in fields.items() if value is not None}
    show_table(["result", "value"], [(name.replace("_", " "), value) for name, value in said.items() if value])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(_cell(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"a result holds {type(value).__name__}, which JSON cannot say")
