"""What tells two sets of samples apart changes the fingerprint, without reading a picture; moving them does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.folder import folder_shard
from maxdiffusion.data.pictures import pictures
from maxdiffusion.data.shards import open_shards
from tests.data.formats import picture


def write(folder: Path, *entries: tuple[str, str, tuple[int, int]]) -> Path:
    """A folder of pictures: names, captions, widths and heights."""
    folder.mkdir()
    for seed, (name, caption, (width, height)) in enumerate(entries):
        (folder / f"{name}.png").write_bytes(picture(seed, width, height))
        (folder / f"{name}.txt").write_text(caption)
    return folder


def told(folder: Path) -> Fingerprint:
    return Fingerprint.of(open_shards([folder_shard(str(folder))], str(folder), size=8))


ENTRIES = (("a", "a fox", (8, 8)), ("b", "a key", (8, 8)))


def test_the_same_pictures_elsewhere_are_the_same(tmp_path: Path) -> None:
    first = told(write(tmp_path / "here", *ENTRIES))
    shutil.copytree(tmp_path / "here", tmp_path / "there", ignore=shutil.ignore_patterns(".maxdiffusion"))
    assert told(tmp_path / "there") == first
    assert first.change(first.as_dict()) is None


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (ENTRIES[:1], "2 samples then, 1 now"),
        ((ENTRIES[0], ("c", *ENTRIES[1][1:])), "2 samples as then, but other names"),
        ((ENTRIES[0], ("b", "a lock", (8, 8))), "2 samples as then, but other captions"),
        ((ENTRIES[0], ("b", "a key", (12, 8))), "2 samples as then, but other sizes"),
    ],
)
def test_a_change_is_told_in_words(entries: tuple, words: str, tmp_path: Path) -> None:
    before = told(write(tmp_path / "before", *ENTRIES)).as_dict()
    after = told(write(tmp_path / "after", *entries))
    assert after.change(before) == words
    assert after.change({"number": before["number"]}) == (words if words.endswith("now") else None)


def test_built_in_pictures_are_told_apart_by_their_captions() -> None:
    fox, key = (Fingerprint.of(pictures([name], size=8)) for name in ("fox", "key"))
    assert fox.number == key.number and fox.change(key.as_dict()) == f"{fox.number} samples as then, but other captions"
