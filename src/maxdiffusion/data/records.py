"""ArrayRecord: Grain's file of records with random access; a record here is a small JSON header and an image file.

A record is four bytes with the length of the header (little-endian), the header in UTF-8 (`{"key": "cats/1.png",
"text": "a cat"}`), and the bytes of the image file as they are. `write_records` makes such a file.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxdiffusion.data.index import Entry, Listing, Stamp
from maxdiffusion.data.report import Broken
from maxdiffusion.data.shards import find_shards, one_line
from maxdiffusion.errors import UsageError

_LENGTH = struct.Struct("<I")


def record_shards(path: str | Path | Sequence[str]) -> list[RecordShard]:
    """The ArrayRecord files that a path stands for, by name; `open_shards` makes a source of them.

    Args:
        path: a folder, file, pattern or list of `.array_record` (or `.arrayrecord`) files.

    Raises:
        UsageError: array_record is not installed, there are no files, or one of them is not there.
    """
    _module()
    files = find_shards(path, suffixes=(".array_record", ".arrayrecord"), kind="ArrayRecord files")
    return [RecordShard(name=name, path=file) for name, file in files.items()]


def write_records(path: str | Path, samples: Iterable[tuple[str, str, bytes]]) -> int:
    """Writes one file of (key, caption, bytes of an image file); it appears when it is whole.

    Returns:
        How many there were.
    """
    partial = Path(f"{path}.tmp")
    writer = _module().ArrayRecordWriter(str(partial), "group_size:1")
    number = 0
    for key, caption, encoded in samples:
        header = json.dumps({"key": key, "text": caption}, ensure_ascii=False).encode()
        writer.write(_LENGTH.pack(len(header)) + header + encoded)
        number += 1
    writer.close()
    os.replace(partial, path)
    return number


@dataclass(frozen=True, kw_only=True)
class RecordShard:
    """One ArrayRecord file; a picture's place is the number of its record.

    Attributes:
        name: what messages and keys call it.
        path: of the file.
    """

    name: str
    path: Path

    @property
    def home(self) -> Path:
        """The folder that it lies in."""
        return self.path.parent

    def stamp(self) -> Stamp:
        """Of the file."""
        return Stamp.of([self.path], self.home, "array_record")

    @cached_property
    def _reader(self) -> Any:
        """One reader, which any thread may use; records are read one at a time, so nothing is read ahead."""
        try:
            return _module().ArrayRecordReader(
                str(self.path), options="readahead_buffer_size:0", file_reader_buffer_size=2**15
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(f"{self.path} is no ArrayRecord file, or damaged ({one_line(str(error))})") from error

    def listing(self) -> Listing:
        """Its records.

        Raises:
            UsageError: the file cannot be read.
        """
        entries: list[Entry] = []
        broken: list[Broken] = []
        seen: Counter[str] = Counter()
        for row in range(self._reader.num_records()):
            header = _header(self._record(row))
            if isinstance(header, str):
                broken.append(Broken(name=f"record {row}", reason=header))
                continue
            key, caption = header
            seen[key] += 1
            if seen[key] > 1:
                broken.append(Broken(name=f"record {row}", reason=f"its key '{key}' is that of an earlier record"))
            elif not caption.strip():
                broken.append(Broken(name=key, reason="its caption is empty"))
            else:
                entries.append(Entry(key=key, caption=one_line(caption), place=(row, 0)))
        if not self._reader.num_records():  # the reader takes any other file for an empty one
            broken.append(Broken(name="", reason="has no records, or is no ArrayRecord file"))
        return Listing(entries=tuple(entries), broken=tuple(broken))

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The image of a record, if it is the one of this key."""
        record = self._record(place[0])
        header = _header(record)
        if isinstance(header, str) or header[0] != key:
            return f"record {place[0]} of {self.path} is another one now"
        (length,) = _LENGTH.unpack_from(record)
        return record[_LENGTH.size + length :]

    def _record(self, row: int) -> bytes:
        return self._reader.read([row])[0]


def _header(record: bytes) -> tuple[str, str] | str:
    """Key and caption, or what is wrong with the header."""
    if len(record) < _LENGTH.size:
        return "is too short for a header"
    (length,) = _LENGTH.unpack_from(record)
    try:
        header = json.loads(record[_LENGTH.size : _LENGTH.size + length].decode())
    except ValueError:
        return "has no JSON header (see write_records for the form of a record)"
    if not isinstance(header, dict) or not all(isinstance(header.get(name), str) for name in ("key", "text")):
        return "its header needs the texts 'key' and 'text'"
    return header["key"], header["text"]


def _module() -> Any:
    try:
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise UsageError("ArrayRecord files need array_record: pip install 'maxdiffusion[data]'") from error
    return array_record_module
