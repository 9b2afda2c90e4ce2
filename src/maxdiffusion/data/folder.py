"""A folder of images with captions as a source; every file that cannot be used is named, with the reason.

Captions come from `metadata.jsonl` in the folder (a JSON object a line, `{"file_name": "cats/1.png", "text": "a cat"}`)
or, where there is no such file, from a text file beside each image (`cats/1.png` and `cats/1.txt`). Subfolders and
symbolic links are followed; names that start with a dot are not looked at.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from maxdiffusion.data.decode import EXTENSIONS
from maxdiffusion.data.index import Entry, Listing, Stamp
from maxdiffusion.data.report import Broken, name_some
from maxdiffusion.data.shards import one_line
from maxdiffusion.errors import UsageError

METADATA = "metadata.jsonl"


def folder_shard(root: str | Path) -> FolderShard:
    """The folder, for `open_shards`.

    Raises:
        UsageError: there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        what = "a file" if root.exists() else "not there"
        raise UsageError(f"{root} is {what}: give a folder of images with captions")
    return FolderShard(root=root)


@dataclass(frozen=True, kw_only=True)
class FolderShard:
    """A folder as one shard.

    Attributes:
        root: the folder.
    """

    root: Path

    @property
    def name(self) -> str:
        """None: files are named relative to the folder."""
        return ""

    @property
    def home(self) -> Path:
        """The folder itself."""
        return self.root

    def stamp(self) -> Stamp:
        """Of all files below the folder."""
        return Stamp.of([self.root / name for name in _files(self.root)], self.root, "folder")

    def listing(self) -> Listing:
        """The images with a caption, by name."""
        return _from_metadata(self.root) if (self.root / METADATA).is_file() else _from_text_files(self.root)

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The file of this name."""
        path = self.root / key
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return "is a link to nothing" if path.is_symlink() else "there is no such file"
        except OSError as error:
            return f"cannot be read ({error.strerror})"


def _listing(captions: dict[str, str], broken: list[Broken], notes: list[str]) -> Listing:
    entries = tuple(Entry(key=name, caption=captions[name], place=(0, 0)) for name in sorted(captions))
    return Listing(entries=entries, broken=tuple(broken), notes=tuple(notes))


def _files(root: Path) -> list[str]:
    """All files below the root, links followed, each folder once, as relative names with forward slashes."""
    names: list[str] = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [(Path(parent) / name).relative_to(root).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in EXTENSIONS


def _from_metadata(root: Path) -> Listing:
    """Captions as `metadata.jsonl` gives them; images that it does not name are broken for want of a caption."""
    broken: list[Broken] = []
    captions: dict[str, str] = {}
    conflicts: set[str] = set()
    repeated: Counter[str] = Counter()
    for number, line in enumerate((root / METADATA).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        entry = _parse(line.removeprefix(b"\xef\xbb\xbf"), root)
        if isinstance(entry, str):
            broken.append(Broken(name=f"{METADATA} line {number}", reason=entry))
            continue
        name, text = entry
        if name in captions:
            repeated[name] += 1
        if captions.setdefault(name, text) != text:
            conflicts.add(name)
    broken += [Broken(name=name, reason=f"has different captions in {METADATA}") for name in conflicts]
    listed = set(captions)
    for name in conflicts:
        del captions[name]
    for name in [name for name, text in captions.items() if not text]:
        broken.append(Broken(name=name, reason="its caption is empty"))
        del captions[name]
    files = _files(root)
    unlisted = [name for name in files if _is_image(name) and name not in listed]
    broken += [Broken(name=name, reason=f"no caption: {METADATA} does not name it") for name in unlisted]
    twice = sorted(repeated.keys() - conflicts)
    notes = [f"{len(twice)} images are listed more than once and used once: {name_some(twice)}"] if twice else []
    return _listing(captions, broken, notes)


def _parse(line: bytes, root: Path) -> tuple[str, str] | str:
    """File and caption of one line of `metadata.jsonl`, or what is wrong with it."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        return f"is not JSON ({error})"
    if not isinstance(entry, dict):
        return "is not a JSON object"
    for field in ("file_name", "text"):
        if not isinstance(entry.get(field), str):
            there = ", ".join(map(str, entry)) or "nothing"
            return f"needs a string '{field}', has {there}"
    name = os.path.normpath(entry["file_name"].replace("\\", "/")).replace(os.sep, "/")
    if not entry["file_name"].strip() or name.startswith("..") or os.path.isabs(name):
        return f"file_name {entry['file_name']!r} does not lie in {root.name or root}"
    return name, one_line(entry["text"])


def _from_text_files(root: Path) -> Listing:
    """Captions from the text file beside each image."""
    files = _files(root)
    text_files = {name: name for name in files if Path(name).suffix == ".txt"}
    text_files |= {Path(name).with_suffix(".txt").as_posix(): name for name in files if Path(name).suffix == ".TXT"}
    broken: list[Broken] = []
    captions: dict[str, str] = {}
    users: Counter[str] = Counter()
    for name in filter(_is_image, files):
        wanted = Path(name).with_suffix(".txt").as_posix()
        if wanted not in text_files:
            broken.append(Broken(name=name, reason=f"no caption: neither {METADATA} nor {wanted} is there"))
            continue
        users[wanted] += 1
        try:
            text = one_line((root / text_files[wanted]).read_bytes().decode("utf-8-sig"))
        except (UnicodeDecodeError, OSError) as error:
            broken.append(Broken(name=name, reason=f"its caption {text_files[wanted]} cannot be read ({error})"))
            continue
        if text:
            captions[name] = text
        else:
            broken.append(Broken(name=name, reason=f"its caption {text_files[wanted]} is empty"))
    shared = sorted(name for name, count in users.items() if count > 1)
    alone = sorted(text_files.keys() - users.keys())
    notes = []
    if shared:
        notes.append(f"{len(shared)} text files caption several images each: {name_some(shared)}")
    if alone:
        notes.append(f"{len(alone)} text files have no image: {name_some(alone)}")
    return _listing(captions, broken, notes)
