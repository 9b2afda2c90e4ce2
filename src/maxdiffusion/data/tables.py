"""Arrow and Parquet as Hugging Face `datasets` writes them: a column of pictures, a column of captions.

A picture is a struct `{bytes, path}` or plain bytes. `save_to_disk` makes Arrow files with a `state.json` that says
which files there are; they are mapped into memory, so any row is as near as any other. A Parquet file is read row group
by row group: the groups last used are kept, and a file whose groups do not fit says so in the report.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from maxdiffusion.data.index import Entry, Listing, Stamp
from maxdiffusion.data.report import Broken
from maxdiffusion.data.shards import find_shards, one_line
from maxdiffusion.errors import UsageError, nearest

GROUP_CACHE_BYTES = 2**30
"""Row groups of Parquet files that are kept in memory, over all files of a source."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the two columns that are read."""

    image: str = "image"
    caption: str = "text"


def arrow_shards(path: str | Path | Sequence[str], *, columns: Columns | None = None) -> list[ArrowShard]:
    """The files of what `Dataset.save_to_disk` wrote, or Arrow files; `open_shards` makes a source of them.

    Args:
        path: the folder with `state.json`, or a folder, file, pattern or list of `.arrow` files (streams or files).
        columns: names of the columns; None for `image` and `text`.

    Raises:
        UsageError: pyarrow is not installed, there are no files, or one of them is not there.
    """
    _pyarrow()
    files = _saved(Path(path)) if isinstance(path, (str, Path)) else None
    if files is None:
        files = find_shards(path, suffixes=(".arrow",), kind="Arrow files")
    return [ArrowShard(name=name, path=file, columns=columns or Columns()) for name, file in files.items()]


def parquet_shards(path: str | Path | Sequence[str], *, columns: Columns | None = None) -> list[ParquetShard]:
    """The Parquet files that a path stands for, by name; arguments and errors are those of `arrow_shards`."""
    _pyarrow()
    files = find_shards(path, suffixes=(".parquet",), kind="Parquet files")
    groups = Groups(limit=GROUP_CACHE_BYTES)
    return [
        ParquetShard(name=name, path=file, columns=columns or Columns(), groups=groups) for name, file in files.items()
    ]


@dataclass(frozen=True, kw_only=True)
class ArrowShard:
    """One Arrow file, mapped into memory; a picture's place is its row.

    Attributes:
        name: what messages and keys call it.
        path: of the file.
        columns: that are read.
    """

    name: str
    path: Path
    columns: Columns

    @property
    def home(self) -> Path:
        """The folder that it lies in."""
        return self.path.parent

    def stamp(self) -> Stamp:
        """Of the file, and the columns read."""
        return Stamp.of([self.path], self.home, "arrow", self.columns.image, self.columns.caption)

    @cached_property
    def _table(self) -> Any:
        pyarrow = _pyarrow()
        try:
            mapped = pyarrow.memory_map(str(self.path))
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
            return reader.read_all()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UsageError(f"{self.path} is no Arrow file, or damaged ({one_line(str(error))})") from error

    def listing(self) -> Listing:
        """Its rows.

        Raises:
            UsageError: the file cannot be read, or lacks a column.
        """
        _check_columns(self._table.schema, self.columns, self.path)
        captions = self._table.column(self.columns.caption).to_pylist()
        return _listing(captions, [(row, 0) for row in range(len(captions))])

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The picture of the row; `key` is not looked at."""
        return _encoded(self._table.column(self.columns.image)[place[0]].as_py(), self.home)


@dataclass(frozen=True, kw_only=True)
class ParquetShard:
    """One Parquet file; a picture's place is its row group and the row within it.

    Attributes:
        name: what messages and keys call it.
        path: of the file.
        columns: that are read.
        groups: keeps the row groups last used, of all files.
    """

    name: str
    path: Path
    columns: Columns
    groups: Groups = field(compare=False)

    @property
    def home(self) -> Path:
        """The folder that it lies in."""
        return self.path.parent

    def stamp(self) -> Stamp:
        """Of the file, and the columns read."""
        return Stamp.of([self.path], self.home, "parquet", self.columns.image, self.columns.caption)

    @cached_property
    def _file(self) -> Any:
        pyarrow = _pyarrow()
        from pyarrow import parquet as reader

        try:
            return reader.ParquetFile(self.path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UsageError(f"{self.path} is no Parquet file, or damaged ({one_line(str(error))})") from error

    def listing(self) -> Listing:
        """Its rows.

        Raises:
            UsageError: the file cannot be read, or lacks a column.
        """
        _check_columns(self._file.schema_arrow, self.columns, self.path)
        captions: list[Any] = []
        places: list[tuple[int, int]] = []
        sizes = [self._file.metadata.row_group(group).total_byte_size for group in range(self._file.num_row_groups)]
        for group in range(len(sizes)):
            found = self._file.read_row_group(group, columns=[self.columns.caption]).column(0).to_pylist()
            captions += found
            places += [(group, row) for row in range(len(found))]
        notes = []
        if sum(sizes) > self.groups.limit:
            notes = [
                f"{len(sizes)} row groups of up to {max(sizes) / 2**20:.0f} MiB do not all fit into memory, and for a "
                "picture its whole group is read: take data.source=arrow (Dataset.save_to_disk) for a shuffled training"
            ]
        listed = _listing(captions, places)
        return Listing(entries=listed.entries, broken=listed.broken, notes=tuple(notes))

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The picture of the row; `key` is not looked at."""
        group, row = place
        column = self.groups.get((str(self.path), group), lambda: self._load(group))
        return _encoded(column[row].as_py(), self.home)

    def _load(self, group: int) -> Any:
        # A reader is not safe for several threads; `Groups` lets one thread in at a time.
        return self._file.read_row_group(group, columns=[self.columns.image]).column(0)


class Groups:
    """Keeps what was last used, up to a number of bytes; one thread reads at a time.

    Attributes:
        limit: bytes kept, at most (one group always is).
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int], load: Callable[[], Any]) -> Any:
        """What `load` makes, or made before."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            found = self._kept[key] = load()
            while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > self.limit:
                self._kept.popitem(last=False)
            return found


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError("Arrow and Parquet need pyarrow: pip install 'maxdiffusion[data]'") from error
    return pyarrow


def _saved(path: Path) -> dict[str, Path] | None:
    """The files that a `state.json` names; None where there is none.

    Raises:
        UsageError: the folder holds several splits, its rows are chosen by another file, or a file is not there.
    """
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise UsageError(
            f"{path} holds the splits {', '.join(splits)}: write data.path={path}/{(splits or ['train'])[0]}"
        )
    if not (path / "state.json").is_file():
        return None
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_data_files"):
        raise UsageError(f"{path} chooses its rows by another file: call flatten_indices() before save_to_disk")
    files = {entry["filename"]: path / entry["filename"] for entry in state["_data_files"]}
    absent = [name for name, file in files.items() if not file.is_file()]
    if absent:
        raise UsageError(f"{path / absent[0]}, which state.json names, is not there: copy the whole folder")
    return files


def _check_columns(schema: Any, columns: Columns, path: Path) -> None:
    """Raises UsageError where a column is not there or holds something else."""
    types = _pyarrow().types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    def is_picture(kind: Any) -> bool:
        fields = {one.name: one.type for one in kind} if types.is_struct(kind) else {}
        return is_bytes(kind) or ("bytes" in fields and is_bytes(fields["bytes"]))

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind)

    wanted = (
        ("image", columns.image, is_picture, "pictures (bytes, or a struct with bytes)"),
        ("caption", columns.caption, is_text, "texts"),
    )
    for role, name, fits, what in wanted:
        options = [column.name for column in schema if fits(column.type)]
        if name not in schema.names:
            hint = nearest(name, options) if options else f"there is none with {what}"
            raise UsageError(f"{path} has no column '{name}': {hint}; set data.{role}_field")
        if name not in options:
            there = f": {nearest(name, options)}" if options else ""
            raise UsageError(f"column '{name}' of {path} holds {schema.field(name).type}, not {what}{there}")


def _listing(captions: Sequence[Any], places: Sequence[tuple[int, int]]) -> Listing:
    """Rows by their number in the file; those without a caption are broken."""
    entries: list[Entry] = []
    broken: list[Broken] = []
    for row, (caption, place) in enumerate(zip(captions, places, strict=True)):
        if caption is not None and caption.strip():
            entries.append(Entry(key=f"{row}", caption=one_line(caption), place=place))
        else:
            broken.append(Broken(name=f"{row}", reason="its caption is empty"))
    return Listing(entries=tuple(entries), broken=tuple(broken))


def _encoded(value: Any, home: Path) -> bytes | str:
    """The bytes of a cell: its own, or those of the file that it names."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return "has no picture"
    if value.get("bytes") is not None:
        return value["bytes"]
    if not value.get("path"):
        return "has neither bytes nor a path"
    try:
        return (home / value["path"]).read_bytes()
    except OSError as error:
        return f"has no bytes, and its file {value['path']} cannot be read ({error.strerror})"
