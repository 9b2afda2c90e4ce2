"""The index of a shard: what it holds and where, made by decoding everything once, kept on disk, dropped when stale.

An index is trusted only if the shard's stamp (name, size and time of the last change of its files, columns read) is
the one that it was made from, and if the files had come to rest before: a file that changes twice within the resolution
of a file system's clock looks the same twice (the "racy" index of git).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Int64

from maxdiffusion.data.decode import decode
from maxdiffusion.data.report import Broken

FORMAT = 1
RESTING_SECONDS = 2.0
"""A file that changed less than this before it was indexed is indexed again (FAT keeps times to two seconds)."""

FOLDER = ".maxdiffusion"
"""Name of the folder beside the data that indices are kept in."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What must be unchanged for an index to hold.

    Attributes:
        content: names, sizes and times of the files, and everything that decides what is read from them.
        changed: when the newest of the files changed, in seconds since 1970.
    """

    content: str
    changed: float

    @classmethod
    def of(cls, paths: Sequence[Path], root: Path, *reading: object) -> Stamp:
        """The stamp of these files below a folder, read in this way; a file that is not there counts as such."""
        lines, changed = [repr((FORMAT, *reading))], 0.0
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                lines.append(f"{os.path.relpath(path, root)}\tnot there")
                continue
            lines.append(f"{os.path.relpath(path, root)}\t{status.st_size}\t{status.st_mtime_ns}")
            changed = max(changed, status.st_mtime)
        return cls(content=hashlib.sha256("\n".join(lines).encode()).hexdigest(), changed=changed)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A captioned picture of a shard, before it is decoded.

    Attributes:
        key: its name, unique in the shard.
        caption: one line.
        place: two numbers that the shard finds it by.
    """

    key: str
    caption: str
    place: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a shard says that it holds; `broken` and `notes` as in `Report`."""

    entries: tuple[Entry, ...]
    broken: tuple[Broken, ...] = ()
    notes: tuple[str, ...] = ()


class Shard(Protocol):
    """A file of many pictures, or a folder of files. Any thread may call `read`.

    Attributes:
        name: what messages and keys call it; empty for a folder, whose keys stand alone.
        home: the folder beside or in it, where its index is kept by default.
    """

    @property
    def name(self) -> str: ...

    @property
    def home(self) -> Path: ...

    def stamp(self) -> Stamp:
        """Changes whenever what it holds may have changed."""
        ...

    def listing(self) -> Listing:
        """The captioned pictures, in order."""
        ...

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The bytes of an image file, or the reason why they cannot be had."""
        ...


@dataclass(frozen=True, kw_only=True)
class Index:
    """The usable pictures of a shard.

    Attributes:
        keys: of each, unique in the shard.
        captions: of each.
        places: two numbers that the shard finds each by.
        shapes: height and width of each, upright.
        broken: what cannot be used.
        notes: as in `Report`.
    """

    keys: tuple[str, ...]
    captions: tuple[str, ...]
    places: Int64[np.ndarray, "n 2"]
    shapes: Int32[np.ndarray, "n 2"]
    broken: tuple[Broken, ...]
    notes: tuple[str, ...]


def index_of(shard: Shard, *, index_folder: Path | None, num_threads: int) -> tuple[Index, str | None]:
    """The index of a shard, from disk where a valid one is, else made and kept.

    Args:
        shard: the shard.
        index_folder: where indices are kept; None for `.maxdiffusion` beside the data.
        num_threads: threads that decode.

    Returns:
        The index, and why it could not be kept (None if it could).
    """
    stamp, path = shard.stamp(), _path(shard, index_folder)
    found = _read(path, stamp)
    if found is not None:
        return found, None
    began = time.time()
    index = _made(shard, num_threads)
    if shard.stamp() != stamp:
        return index, "its files changed while they were read"
    content = {
        "format": FORMAT,
        "stamp": stamp.content,
        "began": began,
        "keys": index.keys,
        "captions": index.captions,
        "places": index.places.tolist(),
        "shapes": index.shapes.tolist(),
        "broken": [(entry.name, entry.reason) for entry in index.broken],
        "notes": index.notes,
    }
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        return index, f"{path.parent} cannot be written ({error.strerror})"
    return index, None


def _path(shard: Shard, index_folder: Path | None) -> Path:
    name = Path(shard.name).name or "folder"
    if index_folder is None:
        return shard.home / FOLDER / f"{name}.json"
    where = os.path.abspath(shard.home / name)
    return index_folder / f"{name}.{hashlib.sha256(where.encode()).hexdigest()[:12]}.json"


def _read(path: Path, stamp: Stamp) -> Index | None:
    """The index of the file if it is whole, of this format, made from this stamp, and its data was at rest."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["stamp"] != stamp.content:
            return None
        if stamp.changed > content["began"] - RESTING_SECONDS:
            return None
        return Index(
            keys=tuple(content["keys"]),
            captions=tuple(content["captions"]),
            places=np.array(content["places"], np.int64).reshape(-1, 2),
            shapes=np.array(content["shapes"], np.int32).reshape(-1, 2),
            broken=tuple(Broken(name=name, reason=reason) for name, reason in content["broken"]),
            notes=tuple(content["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made(shard: Shard, num_threads: int) -> Index:
    """The index, by decoding every picture."""
    listing = shard.listing()

    def shape(entry: Entry) -> tuple[int, int] | str:
        encoded = shard.read(entry.key, entry.place)
        picture = decode(encoded) if isinstance(encoded, bytes) else encoded
        return picture if isinstance(picture, str) else (picture.height, picture.width)

    with ThreadPoolExecutor(max(num_threads, 1)) as pool:
        shapes = list(pool.map(shape, listing.entries))
    used = [(entry, found) for entry, found in zip(listing.entries, shapes, strict=True) if not isinstance(found, str)]
    failed = [
        Broken(name=entry.key, reason=found)
        for entry, found in zip(listing.entries, shapes, strict=True)
        if isinstance(found, str)
    ]
    return Index(
        keys=tuple(entry.key for entry, _ in used),
        captions=tuple(entry.caption for entry, _ in used),
        places=np.array([entry.place for entry, _ in used], np.int64).reshape(-1, 2),
        shapes=np.array([found for _, found in used], np.int32).reshape(-1, 2),
        broken=(*listing.broken, *failed),
        notes=listing.notes,
    )
