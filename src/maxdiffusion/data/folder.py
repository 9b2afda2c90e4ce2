"""A folder of images with captions as a source; every file that cannot be used is named, with the reason.

Captions come from `metadata.jsonl` in the folder (a JSON object a line, `{"file_name": "cats/1.png", "text": "a cat"}`)
or, where there is no such file, from a text file beside each image (`cats/1.png` and `cats/1.txt`). Subfolders and
symbolic links are followed; names that start with a dot are not looked at.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from maxdiffusion.data.source import Sample
from maxdiffusion.errors import MaxDiffusionWarning, UsageError, nearest

OnBroken = Literal["skip", "error"]
METADATA = "metadata.jsonl"
EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
KEEP_BYTES = 2**30  # decoded images are kept in memory while all of them together need no more than this
NAMED_IN_MESSAGE = 10

# What Pillow raises on files that are cut short, mangled or no images at all.
_DECODING_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


class BrokenDataError(UsageError):
    """Some of a folder's entries cannot be used, and `on_broken` is "error"."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One entry that cannot be used.

    Attributes:
        name: the file, relative to the folder, or the line of `metadata.jsonl`.
        reason: what is wrong with it, without the name.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """What was found in a folder.

    Attributes:
        used: number of images with a caption that make up the source.
        broken: entries that cannot be used, in the order of their names.
        notes: sentences on what works but may not be meant: images listed twice, one caption for many images, text
            files without an image, images smaller than the size asked for.
    """

    used: int
    broken: tuple[Broken, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.used} images with captions", *self.notes]
        if self.broken:
            lines.append(f"{len(self.broken)} cannot be used: {_name_some(self.broken)}")
        return "; ".join(lines)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What `folder` returns: a `Source` over the usable images, in the order of their names.

    Attributes:
        root: the folder.
        names: file of each image, relative to the folder, with forward slashes; these are the samples' keys.
        captions: one an image.
        size: side of the images in pixels.
        report: what was found, and what could not be used.
        kept: the decoded images where they all fit into memory, else None, and files are read when asked for.
    """

    root: Path
    names: tuple[str, ...]
    captions: tuple[str, ...]
    size: int
    report: FolderReport
    kept: tuple[UInt8[np.ndarray, "size size 3"], ...] | None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int, /) -> Sample:
        name = self.names[index]
        if self.kept is not None:
            image = self.kept[index]
        else:
            read = _read(self.root / name, self.size)
            if isinstance(read, str):
                raise BrokenDataError(f"{name} could be read when training began and no longer can: {read}")
            image = read.image
        return Sample(image=image, caption=self.captions[index], key=name)


def folder(root: str | Path, *, size: int, on_broken: OnBroken = "error", num_threads: int = 4) -> Folder:
    """Open a folder of captioned images; each is decoded once now, so that no broken one turns up hours later.

    An image is turned upright (EXIF), laid on white where it is transparent, scaled so that its shorter side is `size`,
    and cropped in the middle to a square. Sixteen-bit, grey, palette and CMYK images become 8-bit RGB; of an animation
    the first frame is taken. Colour profiles are not applied.

    Args:
        root: the folder.
        size: side of the square images in pixels.
        on_broken: with `error` entries that cannot be used are an error that names them; with `skip` they are left out,
            with a warning that names them (all are in `.report.broken`).
        num_threads: threads that decode.

    Raises:
        BrokenDataError: something cannot be used and `on_broken` is "error".
        UsageError: no such folder, nothing usable in it, or an argument out of range.
    """
    root = Path(root)
    if on_broken not in get_args(OnBroken):
        raise UsageError(f"unknown on_broken '{on_broken}': {nearest(on_broken, get_args(OnBroken))}")
    if size < 1:
        raise UsageError(f"size is {size}: it is a number of pixels, at least 1")
    if not root.is_dir():
        what = "a file" if root.exists() else "not there"
        raise UsageError(f"{root} is {what}: give a folder of images with captions")
    found = _from_metadata(root) if (root / METADATA).is_file() else _from_text_files(root)
    names = sorted(found.captions)
    keep = len(names) * size * size * 3 <= KEEP_BYTES
    with ThreadPoolExecutor(num_threads) as pool:
        read = list(pool.map(lambda name: _read(root / name, size, keep=keep), names))
    broken = list(found.broken)
    used: list[tuple[str, _Read]] = []
    for name, result in zip(names, read, strict=True):
        if isinstance(result, str):
            broken.append(Broken(name=name, reason=result))
        else:
            used.append((name, result))
    broken.sort(key=lambda entry: entry.name)
    notes = list(found.notes)
    small = [name for name, result in used if result.enlarged]
    if small:
        notes.append(f"{len(small)} images are smaller than {size} pixels: {_name_some(small)}")
    report = FolderReport(used=len(used), broken=tuple(broken), notes=tuple(notes))
    _judge(root, report, on_broken)
    return Folder(
        root=root,
        names=tuple(name for name, _ in used),
        captions=tuple(found.captions[name] for name, _ in used),
        size=size,
        report=report,
        kept=tuple(result.image for _, result in used) if keep else None,
    )


def _judge(root: Path, report: FolderReport, on_broken: OnBroken) -> None:
    """Raise or warn as `on_broken` says; an empty result is always an error."""
    if report.broken and on_broken == "error":
        raise BrokenDataError(
            f"{len(report.broken)} of {len(report.broken) + report.used} entries in {root} cannot be used: "
            f"{_name_some(report.broken)}. Mend or remove them, or leave them out with on_broken='skip'"
        )
    if not report.used:
        count = len(report.broken)
        why = f"all {count} entries are broken: {_name_some(report.broken)}" if count else "it has none"
        raise UsageError(f"no usable image in {root}: {why}. Images need a line in {METADATA} or a .txt beside them")
    if report.broken:
        warnings.warn(
            f"{len(report.broken)} of {len(report.broken) + report.used} entries in {root} are left out: "
            f"{_name_some(report.broken)}",
            MaxDiffusionWarning,
            stacklevel=3,
        )


def _name_some(entries: Sequence[object]) -> str:
    more = f", and {len(entries) - NAMED_IN_MESSAGE} more" if len(entries) > NAMED_IN_MESSAGE else ""
    return ", ".join(str(entry) for entry in entries[:NAMED_IN_MESSAGE]) + more


# --- Which images there are, and their captions ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Found:
    captions: dict[str, str]  # file relative to the root -> caption
    broken: tuple[Broken, ...]
    notes: tuple[str, ...]


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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _from_metadata(root: Path) -> _Found:
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
    notes = [f"{len(twice)} images are listed more than once and used once: {_name_some(twice)}"] if twice else []
    notes += _same_caption(captions.values())
    return _Found(captions=captions, broken=tuple(broken), notes=tuple(notes))


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
    return name, _one_line(entry["text"])


def _from_text_files(root: Path) -> _Found:
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
            text = _one_line((root / text_files[wanted]).read_bytes().decode("utf-8-sig"))
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
        notes.append(f"{len(shared)} text files caption several images each: {_name_some(shared)}")
    if alone:
        notes.append(f"{len(alone)} text files have no image: {_name_some(alone)}")
    notes += _same_caption(captions.values())
    return _Found(captions=captions, broken=tuple(broken), notes=tuple(notes))


def _same_caption(captions: Iterable[str]) -> list[str]:
    counts = Counter(captions)
    repeated = [f"'{text}' ({count} times)" for text, count in counts.most_common() if count > 1]
    return [f"{len(repeated)} captions come more than once: {_name_some(repeated)}"] if repeated else []


# --- Reading one image ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Read:
    image: UInt8[np.ndarray, "size size 3"]
    enlarged: bool


_NOTHING = np.zeros((0, 0, 3), np.uint8)


def _read(path: Path, size: int, *, keep: bool = True) -> _Read | str:
    """The image as a square of RGB, or the reason why it cannot be had; without `keep` only whether it can."""
    try:
        if not path.exists():
            return "is a link to nothing" if path.is_symlink() else "there is no such file"
        if path.stat().st_size == 0:
            return "is an empty file"
        with Image.open(path) as opened:
            opened.load()
            picture = _to_rgb(ImageOps.exif_transpose(opened))
    except Image.UnidentifiedImageError:
        return "is not an image, or of a kind that cannot be read"
    except _DECODING_ERRORS as error:
        return f"cannot be decoded ({_one_line(str(error)) or type(error).__name__})"
    enlarged = min(picture.size) < size
    if not keep:
        return _Read(image=_NOTHING, enlarged=enlarged)
    square = ImageOps.fit(picture, (size, size), Image.Resampling.LANCZOS, centering=(0.5, 0.5))
    return _Read(image=np.asarray(square), enlarged=enlarged)


def _to_rgb(picture: Image.Image) -> Image.Image:
    """Eight-bit RGB on white."""
    if picture.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them at 255
        grey = np.asarray(picture).astype(np.float64) / 257
        if grey.max() > 255 or grey.min() < 0:
            raise ValueError("32-bit grey values: save it with 8 or 16 bits")
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("floating-point grey values without a range: save it with 8 or 16 bits")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")
