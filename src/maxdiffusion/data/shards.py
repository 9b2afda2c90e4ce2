"""A source over shards: any format that lists captioned pictures and reads their bytes becomes a `Source` here."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, UInt8

from maxdiffusion.data.buckets import BucketRule, Buckets
from maxdiffusion.data.decode import decode, fit
from maxdiffusion.data.index import Index, Shard, index_of
from maxdiffusion.data.report import Broken, BrokenDataError, OnBroken, Report, check_on_broken, name_some
from maxdiffusion.data.source import Sample
from maxdiffusion.errors import UsageError

KEEP_BYTES = 2**30
"""Decoded images are kept in memory while all of them together need no more than this."""


@dataclass(frozen=True, kw_only=True)
class ShardedPictures:
    """A `Source` over the usable pictures of shards, in their order.

    Attributes:
        shards: where the pictures are read from.
        keys: one a picture: the shard's name and the picture's own.
        captions: one a picture.
        shard: which shard each is in.
        places: where in it.
        shapes: height and width of each as it is stored, upright.
        buckets: the size that each is given in.
        report: what was found, and what could not be used.
        kept: pictures decoded so far, where all of them fit into memory; else None.
    """

    shards: tuple[Shard, ...]
    keys: tuple[str, ...]
    captions: tuple[str, ...]
    shard: Int32[np.ndarray, " n"]
    places: Int64[np.ndarray, "n 2"]
    shapes: Int32[np.ndarray, "n 2"]
    buckets: Buckets
    report: Report
    kept: dict[int, UInt8[np.ndarray, "height width 3"]] | None = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int, /) -> Sample:
        image = None if self.kept is None else self.kept.get(index)
        if image is None:
            image = self._read(index)
            if self.kept is not None:
                self.kept[index] = image
        return Sample(image=image, caption=self.captions[index], key=self.keys[index])

    def _read(self, index: int) -> UInt8[np.ndarray, "height width 3"]:
        shard, (first, second) = self.shards[self.shard[index]], self.places[index]
        encoded = shard.read(self.keys[index].removeprefix(f"{shard.name}/"), (int(first), int(second)))
        picture = decode(encoded) if isinstance(encoded, bytes) else encoded
        if isinstance(picture, str):
            raise BrokenDataError(f"{self.keys[index]} could be read when training began and no longer can: {picture}")
        return fit(picture, *self.buckets.sizes[self.buckets.of[index]])


def open_shards(
    shards: Sequence[Shard],
    where: str,
    *,
    size: int,
    on_broken: OnBroken = "error",
    num_threads: int = 4,
    index_folder: Path | None = None,
    buckets: BucketRule | None = None,
) -> ShardedPictures:
    """Makes a source of shards; each picture is decoded once before, so that no broken one turns up hours later.

    What was found is kept in an index for each shard, so the next start decodes nothing.

    Args:
        shards: in the order of the pictures.
        where: the folder or pattern, for messages.
        size: side of the square pictures in pixels: shorter sides are scaled to it, longer ones cropped in the middle.
        on_broken: with `error` entries that cannot be used are an error that names them; with `skip` they are left out,
            with a warning that names them (all are in `.report.broken`).
        num_threads: threads that decode.
        index_folder: where indices are kept; None for `.maxdiffusion` beside the data.
        buckets: sizes that pictures are sorted into by their ratio; None for the square alone.

    Raises:
        BrokenDataError: something cannot be used and `on_broken` is "error".
        UsageError: nothing usable, or an argument out of range.
    """
    check_on_broken(on_broken)
    if size < 1:
        raise UsageError(f"size is {size}: it is a number of pixels, at least 1")
    indexed = [index_of(shard, index_folder=index_folder, num_threads=num_threads) for shard in shards]
    indices = [index for index, _ in indexed]
    keys = _joined(shards, indices)
    captions = tuple(itertools.chain.from_iterable(index.captions for index in indices))
    shapes = np.concatenate([np.zeros((0, 2), np.int32), *(index.shapes for index in indices)])
    broken = [
        Broken(name=_within(shard, entry.name), reason=entry.reason)
        for shard, index in zip(shards, indices, strict=True)
        for entry in index.broken
    ]
    notes = [
        f"{shard.name}: {note}" if shard.name else note
        for shard, index in zip(shards, indices, strict=True)
        for note in index.notes
    ]
    notes += _same_caption(captions)
    sorted_in = (buckets or BucketRule(sizes=((size, size),))).sort(shapes)
    wanted = np.array(sorted_in.sizes, np.int32).reshape(-1, 2)[sorted_in.of]
    small = [keys[row] for row in np.flatnonzero((shapes < wanted).any(axis=1))]
    if small:
        what = f"{size} pixels" if buckets is None else "their bucket"
        notes.append(f"{len(small)} images are smaller than {what}: {name_some(small)}")
    unkept = [f"{shard.name or where} ({why})" for shard, (_, why) in zip(shards, indexed, strict=True) if why]
    if unkept:
        notes.append(
            f"every start decodes all of {name_some(unkept)}: set data.index_folder to a folder to keep indices in"
        )
    report = Report(used=len(keys), broken=tuple(sorted(broken, key=lambda entry: entry.name)), notes=tuple(notes))
    report.judge(where, on_broken)
    return ShardedPictures(
        shards=tuple(shards),
        keys=keys,
        captions=captions,
        shard=np.repeat(np.arange(len(shards), dtype=np.int32), [len(index.keys) for index in indices]),
        places=np.concatenate([index.places for index in indices]),
        shapes=shapes,
        buckets=sorted_in,
        report=report,
        kept={} if 3 * int(wanted.prod(axis=1, dtype=np.int64).sum()) <= KEEP_BYTES else None,
    )


def find_shards(path: str | Path | Sequence[str], *, suffixes: Sequence[str], kind: str) -> dict[str, Path]:
    """The files that a path stands for, each with its name, in the order of their names.

    Args:
        path: a folder (all its files of this kind, subfolders too), a file, a pattern with `{000..012}`, `{a,b}` or
            `*`, or a list of these.
        suffixes: endings of such files, in small letters.
        kind: what they are called in messages.

    Raises:
        UsageError: there are none, or one of them is not there.
    """
    written = [path] if isinstance(path, (str, Path)) else list(path)
    files = [file for one in written for file in _files(str(one), suffixes, kind)]
    twice = [str(file) for file, count in Counter(map(os.path.abspath, files)).items() if count > 1]
    if twice:
        raise UsageError(f"{name_some(twice)} is named more than once in data.path: name each file once")
    base = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    return {Path(os.path.relpath(file, base)).as_posix(): file for file in files}


def _files(path: str, suffixes: Sequence[str], kind: str) -> list[Path]:
    if re.match(r"[a-z][a-z0-9+.-]*://", path):
        raise UsageError(f"{path} is a remote address: copy or mount it, and give a local path")
    if Path(path).is_dir():
        found = [
            Path(parent) / name
            for parent, folders, names in os.walk(path, followlinks=True)
            for name in names
            if name.lower().endswith(tuple(suffixes)) and not name.startswith(".")
            if not any(step.startswith(".") for step in Path(parent).relative_to(path).parts)
        ]
        if not found:
            raise UsageError(f"{path} has no {kind} (names that end in {' or '.join(suffixes)}): give their folder")
        return sorted(found)
    expanded: list[Path] = []
    for one in braces(path):
        matches = sorted(glob.glob(one)) if glob.has_magic(one) and not Path(one).exists() else [one]
        absent = [match for match in matches or [one] if not Path(match).is_file()]
        if absent:
            raise UsageError(f"{absent[0]} is not there: give a folder, a file or a pattern of {kind}")
        expanded += map(Path, matches)
    return expanded


def braces(pattern: str) -> list[str]:
    """The texts that a pattern with `{000..012}` or `{a,b}` stands for, as a shell expands them."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    inner = match.group(1)
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
    if numbers:
        first, last = numbers.groups()
        options = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        if not options:
            raise UsageError(f"{{{inner}}} in {pattern} counts down: write the smaller number first")
    elif "," in inner:
        options = inner.split(",")
    else:
        raise UsageError(f"{{{inner}}} in {pattern} is no range: write {{000..012}} or {{a,b}}")
    return [text for option in options for text in braces(pattern[: match.start()] + option + pattern[match.end() :])]


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def _within(shard: Shard, name: str) -> str:
    return f"{shard.name}/{name}" if shard.name and name else name or shard.name


def _joined(shards: Sequence[Shard], indices: Sequence[Index]) -> tuple[str, ...]:
    return tuple(_within(shard, key) for shard, index in zip(shards, indices, strict=True) for key in index.keys)


def _same_caption(captions: Iterable[str]) -> list[str]:
    counts = Counter(captions)
    repeated = [f"'{text}' ({count} times)" for text, count in counts.most_common() if count > 1]
    return [f"{len(repeated)} captions come more than once: {name_some(repeated)}"] if repeated else []
