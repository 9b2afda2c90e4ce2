"""What an encoder made of each sample, on disk: made once, read in later epochs, never taken for another content.

An entry is found by two keys. The encoder's is a hash of its weights, its configuration and what is done around it
(`encoder_key`); the content's is a hash of what it was given (`content_key`), not of a file's name. So a changed file
or model is a new key. Entries are written under another name and renamed, each carries a checksum, and a damaged one is
made anew: any number of hosts and threads may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from maxdiffusion.errors import UsageError
from maxdiffusion.log import say_once

log = logging.getLogger(__name__)

FORMAT = 1
RECOUNT_SHARE = 1 / 64
"""The folder is measured again whenever this share of the limit has been written: other hosts write too."""

Arrays: TypeAlias = dict[str, np.ndarray]


def encoder_key(weights: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The hash of an encoder.

    Args:
        weights: names and arrays, nested or not; their order does not matter.
        config: everything else that decides what comes out, as JSON can hold it: architecture, scaling, dtype, how
            pictures are cropped and captions are cut into words.

    Raises:
        UsageError: the configuration holds something that JSON cannot.
    """
    digest = hashlib.sha256()
    for name, array in sorted(_flat(weights, ())):
        _add(digest, "/".join(name), np.asarray(array))
    try:
        digest.update(json.dumps([FORMAT, config], sort_keys=True).encode())
    except TypeError as error:
        raise UsageError(f"the configuration of an encoder must be JSON ({error}): write names and numbers") from error
    return digest.hexdigest()


def content_key(*content: bytes | str | np.ndarray) -> str:
    """The hash of what an encoder is given: a caption, the bytes of a file, pixels, or several of them in order."""
    digest = hashlib.sha256()
    for part in content:
        if isinstance(part, np.ndarray):
            _add(digest, "array", part)
        else:
            encoded = part.encode() if isinstance(part, str) else part
            digest.update(f"{type(part).__name__} {len(encoded)}\n".encode() + encoded)
    return digest.hexdigest()


class EncodedCache:
    """Arrays by the content that an encoder made them of.

    Attributes:
        folder: where the entries of this encoder lie.
        limit_bytes: what all encoders' entries may take together; None for no limit. Nothing is thrown away: when it is
            reached, further entries are made anew each time, which is said once.
        read: entries that were found.
        made: entries that the encoder had to make.
    """

    def __init__(self, root: str | Path, *, name: str, key: str, limit_bytes: int | None = None) -> None:
        """Opens the entries of one encoder.

        Args:
            root: folder of all encoders' entries; made when the first is written.
            name: of the encoder, for people.
            key: from `encoder_key`.
            limit_bytes: see the class.
        """
        self._root, self._name = Path(root), name
        self.folder = self._root / f"{name}-{key[:32]}"
        self.limit_bytes = limit_bytes
        self.read = self.made = 0
        self._lock = threading.Lock()
        self._bytes = self._since_count = 0
        self._counted = False

    def __call__(self, keys: Sequence[str], encode: Callable[[list[int]], Sequence[Arrays]]) -> list[Arrays]:
        """The arrays of each content.

        Args:
            keys: from `content_key`, one a row.
            encode: given the rows that are not there, makes the arrays of each, in their order; not called when none is
                missing. Rows of the same content are asked for once.

        Raises:
            UsageError: `encode` gave another number of results than it was asked for.
        """
        found = {key: self._load(key) for key in dict.fromkeys(keys)}
        missing = [key for key, arrays in found.items() if arrays is None]
        if missing:
            made = encode([keys.index(key) for key in missing])
            if len(made) != len(missing):
                raise UsageError(f"the encoder {self._name} gave {len(made)} results for {len(missing)} rows")
            for key, arrays in zip(missing, made, strict=True):
                self._store(key, arrays)
                found[key] = arrays
        with self._lock:
            self.read += len(found) - len(missing)
            self.made += len(missing)
        return [arrays for key in keys if (arrays := found[key]) is not None]

    def __str__(self) -> str:
        """How many entries were read and made, and what the folder takes."""
        limit = "" if self.limit_bytes is None else f" of {self.limit_bytes / 2**30:.2f}"
        taken = self.measure() / 2**30
        return f"{self._name}: {self.read} read, {self.made} made, {taken:.2f}{limit} GiB in {self._root}"

    def measure(self) -> int:
        """Bytes that the entries of all encoders take."""
        total = 0
        for parent, _, names in os.walk(self._root):
            for name in names:
                with contextlib.suppress(OSError):  # another host may just have renamed it
                    total += os.stat(os.path.join(parent, name)).st_size
        return total

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def _load(self, key: str) -> Arrays | None:
        """The entry, if it is there and whole."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                whole = (file.metadata() or {}).get("checksum") == _checksum(arrays)
        except (SafetensorError, OSError, ValueError):
            whole, arrays = False, {}
        if not whole:
            say_once(log, f"{path} is damaged, so it is made anew")
            return None
        return arrays

    def _store(self, key: str, arrays: Arrays) -> None:
        """Writes an entry, unless the limit is reached."""
        contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        content = save(contiguous, {"checksum": _checksum(contiguous)})
        if not self._fits(len(content)):
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _fits(self, size: int) -> bool:
        """Whether an entry of this size may be written; counts it."""
        if self.limit_bytes is None:
            return True
        with self._lock:
            if not self._counted or self._since_count > self.limit_bytes * RECOUNT_SHARE:
                self._bytes, self._since_count, self._counted = self.measure(), 0, True
            if self._bytes + size <= self.limit_bytes:
                self._bytes += size
                self._since_count += size
                return True
        say_once(
            log,
            f"the cache {self._root} is full ({self.limit_bytes / 2**30:.2f} GiB), so what {self._name} makes of "
            "further samples is not kept: raise the limit, or remove folders of other encoders in it",
        )
        return False


def _flat(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in tree.items():
        found += _flat(value, (*path, name)) if isinstance(value, Mapping) else [((*path, name), value)]
    return found


def _add(digest: Any, name: str, array: np.ndarray) -> None:
    digest.update(f"{len(name)} {name} {array.dtype} {array.shape}\n".encode())
    digest.update(array.tobytes())


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        _add(digest, name, arrays[name])
    return digest.hexdigest()
