"""WebDataset: tar files whose members of one key are one sample; read at random, by offsets found once.

The key of a member is its path up to the first dot of its file name, what follows is its kind: `cats/0001.jpg` and
`cats/0001.txt` are one captioned picture. The caption is the `.txt`, or, where there is none, a field of the `.json`.
"""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxdiffusion.data.decode import EXTENSIONS
from maxdiffusion.data.index import Entry, Listing, Stamp
from maxdiffusion.data.report import Broken, name_some
from maxdiffusion.data.shards import find_shards, one_line
from maxdiffusion.errors import UsageError, nearest

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How files of gzip, bzip2, xz and zstandard begin."""


def tar_shards(path: str | Path | Sequence[str], *, caption_field: str = "text") -> list[TarShard]:
    """The tar files that a path stands for, by name; `open_shards` makes a source of them.

    Args:
        path: a folder of `.tar` files, one such file, a pattern such as `train-{000..012}.tar`, or a list of these.
        caption_field: of the `.json` members, for samples without a `.txt`.

    Raises:
        UsageError: there are none, or one of them is not there.
    """
    files = find_shards(path, suffixes=(".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst"), kind="tar shards")
    return [TarShard(name=name, path=file, caption_field=caption_field) for name, file in files.items()]


@dataclass(frozen=True, kw_only=True)
class TarShard:
    """One tar file; a picture's place is its offset and its length in bytes.

    Attributes:
        name: what messages and keys call it.
        path: of the file.
        caption_field: of the `.json` members.
    """

    name: str
    path: Path
    caption_field: str

    @property
    def home(self) -> Path:
        """The folder that it lies in."""
        return self.path.parent

    def stamp(self) -> Stamp:
        """Of the file, and the field that captions are read from."""
        return Stamp.of([self.path], self.home, "webdataset", self.caption_field)

    def read(self, key: str, place: tuple[int, int]) -> bytes | str:
        """The bytes at the place; `key` is not looked at."""
        offset, length = place
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                found = file.read(length)
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror})"
        return found if len(found) == length else f"{self.path} ends before it"

    def listing(self) -> Listing:
        """Its samples, in the order of their pictures.

        Raises:
            UsageError: the file is compressed, and nothing in it could be found by an offset.
        """
        members, broken = self._members()
        groups: dict[str, list[tarfile.TarInfo]] = defaultdict(list)
        for member in members:
            groups[split(member.name)[0]].append(member)
        entries: list[Entry] = []
        bare: list[str] = []
        for key, group in groups.items():
            images = [member for member in group if split(member.name)[1] in EXTENSIONS]
            if not images:
                bare.append(key)
                continue
            name = images[0].name
            if len(images) > 1:
                there = ", ".join(member.name for member in images)
                broken.append(Broken(name=name, reason=f"its key has {len(images)} images ({there}), one is allowed"))
                continue
            caption = self._caption(group)
            if isinstance(caption, Broken):
                broken.append(Broken(name=name, reason=caption.reason))
                continue
            entries.append(Entry(key=name, caption=caption, place=(images[0].offset_data, images[0].size)))
        notes = [f"{len(bare)} keys have no image: {name_some(bare)}"] if bare else []
        return Listing(entries=tuple(entries), broken=tuple(broken), notes=tuple(notes))

    def _members(self) -> tuple[list[tarfile.TarInfo], list[Broken]]:
        """The plain files of the archive; one that is cut short or damaged ends there, and is named."""
        with self.path.open("rb") as file:
            start = file.read(6)
        if any(start.startswith(magic) for magic in COMPRESSED):
            raise UsageError(
                f"{self.path} is compressed, so nothing in it can be found by an offset: unpack it to a .tar"
            )
        members: list[tarfile.TarInfo] = []
        broken: list[Broken] = []
        size = self.path.stat().st_size
        try:
            with tarfile.open(self.path, "r:") as archive:
                while (member := archive.next()) is not None:
                    if member.isfile() and not member.issparse():
                        members.append(member)
                end = archive.offset
        except (tarfile.TarError, EOFError, OSError) as error:
            after = f"after {members[-1].name}" if members else "from its beginning"
            broken.append(Broken(name="", reason=f"cannot be read {after} ({one_line(str(error))})"))
        else:
            # tarfile takes a header that it cannot read for the end; the end is a block of zeros.
            with self.path.open("rb") as file:
                file.seek(end)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    broken.append(Broken(name="", reason=f"is cut short or damaged at byte {end}: it has no end mark"))
        return [member for member in members if member.offset_data + member.size <= size], broken

    def _caption(self, group: Sequence[tarfile.TarInfo]) -> str | Broken:
        """The caption of a key, or what is wrong with it (under no name)."""
        by_kind = {split(member.name)[1]: member for member in group}
        member = by_kind.get(".txt") or by_kind.get(".json")
        if member is None:
            return Broken(name="", reason="no caption: its key has neither a .txt nor a .json")
        content = self.read(member.name, (member.offset_data, member.size))
        if isinstance(content, str):
            return Broken(name="", reason=content)
        try:
            text = content.decode("utf-8-sig")
            found = text if member is by_kind.get(".txt") else json.loads(text)
        except ValueError as error:
            return Broken(name="", reason=f"its caption {member.name} cannot be read ({one_line(str(error))})")
        if isinstance(found, dict):
            if not isinstance(found.get(self.caption_field), str):
                hint = nearest(self.caption_field, [name for name, value in found.items() if isinstance(value, str)])
                reason = f"{member.name} has no text '{self.caption_field}' ({hint}): set data.caption_field"
                return Broken(name="", reason=reason)
            found = found[self.caption_field]
        if not isinstance(found, str) or not found.strip():
            return Broken(name="", reason=f"its caption {member.name} is empty")
        return one_line(found)


def split(name: str) -> tuple[str, str]:
    """Key and kind of a member, the kind in small letters with its dot: `a/b.c.PNG` is ("a/b", ".c.png")."""
    folder, slash, file = name.rpartition("/")
    stem, dot, kind = file.partition(".")
    return f"{folder}{slash}{stem}", f"{dot}{kind}".lower()
