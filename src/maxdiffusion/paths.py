"""A run lives in a local folder or in an object store: every path of a run goes through `as_path`.

Local paths are pathlib's. Addresses such as `gs://bucket/run` become etils' paths, which have the methods of pathlib's
and are what Orbax itself reads and writes through.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

from maxdiffusion.errors import UsageError, nearest

PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
"""Kinds of addresses, and the package that reads and writes there."""

_FOLDED = re.compile(f"^({'|'.join(PACKAGES)}):/(?!/)")


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that a text stands for.

    Args:
        path: local, or an address such as `gs://bucket/run`.

    Raises:
        UsageError: an address of an unknown kind, or the package for its kind is not installed.
    """
    # pathlib folds the two slashes of an address.
    text = _FOLDED.sub(r"\1://", os.fspath(path))
    scheme, mark, _ = text.partition("://")
    if not mark:
        return Path(path)
    if scheme not in PACKAGES:
        raise UsageError(f"'{text}': no store is called '{scheme}://': {nearest(scheme, PACKAGES)}")
    import fsspec
    from etils import epath

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = PACKAGES[scheme]
        raise UsageError(
            f"'{text}' needs the package {package}: pip install {package}, or give a local folder"
        ) from error
    return cast(Path, epath.Path(text))


def is_remote(path: Path) -> bool:
    """Whether a path is an object store's: there, files cannot grow and folders do not move as one."""
    return "://" in os.fspath(path)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text that is either the old one or the new one, whenever the process dies.

    Args:
        path: from `as_path`; its folder exists.
        text: of the whole file.
    """
    if is_remote(path):  # an object store knows no half objects
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def as_text(path: str | os.PathLike[str]) -> str:
    """The path as Orbax takes it: absolute, or an address."""
    found: Any = as_path(path)
    return os.fspath(found if is_remote(found) else found.absolute())
