"""Every format gives the same samples for the same pictures, and an index that is stale is never used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.data import index as index_module
from maxdiffusion.data.report import BrokenDataError
from maxdiffusion.data.shards import ShardedPictures, braces, find_shards, open_shards
from maxdiffusion.data.source import Source
from maxdiffusion.data.webdataset import tar_shards
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from tests.data.formats import FORMATS, come_to_rest, picture, some_files, write_tar


def opened(name: str, root: Path, **arguments) -> ShardedPictures:
    return open_shards(FORMATS[name][1](root), name, **{"size": 8, **arguments})


def needs(name: str) -> None:
    if name in ("arrow", "parquet"):
        pytest.importorskip("pyarrow")


def written(name: str, root: Path, files) -> Path:
    needs(name)
    (root / name).mkdir()
    FORMATS[name][0](root / name, files)
    return root / name


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_samples_in_every_format(name: str, tmp_path: Path) -> None:
    files = some_files()
    root = written(name, tmp_path, files)
    source = opened(name, root)
    (tmp_path / "reference").mkdir()
    reference = opened("folder", written("folder", tmp_path / "reference", files))
    assert isinstance(source, Source) and len(source) == len(files)
    for row in reversed(range(len(files))):
        assert np.array_equal(source[row].image, reference[row].image)
        assert source[row].caption == files[row][1]
    assert source.shapes.tolist() == reference.shapes.tolist()
    assert len(set(source.keys)) == len(files)
    assert source.report.broken == ()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_broken_is_named_with_its_reason(name: str, tmp_path: Path) -> None:
    files = some_files()
    files[1] = (files[1][0], files[1][1], files[1][2][:60])
    files[3] = (files[3][0], " ", files[3][2])
    root = written(name, tmp_path, files)
    with pytest.raises(BrokenDataError, match=r"2 of 5 entries .*on_broken='skip'"):
        opened(name, root)
    with pytest.warns(MaxDiffusionWarning, match="2 of 5"):
        source = opened(name, root, on_broken="skip")
    assert source.captions == tuple(files[row][1] for row in (0, 2, 4))
    reasons = [entry.reason for entry in source.report.broken]
    assert sum("cannot be decoded" in reason for reason in reasons) == 1
    assert sum("empty" in reason for reason in reasons) == 1
    assert len({entry.name for entry in source.report.broken}) == 2 and "" not in dict.fromkeys(reasons)


@pytest.mark.parametrize("name", FORMATS)
def test_the_second_start_decodes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = some_files(3)
    files[1] = (files[1][0], files[1][1], b"no picture")
    root = written(name, tmp_path, files)
    come_to_rest(root)
    with pytest.warns(MaxDiffusionWarning):
        first = opened(name, root, on_broken="skip")
    monkeypatch.setattr(index_module, "_made", None)
    with pytest.warns(MaxDiffusionWarning):
        second = opened(name, root, on_broken="skip")
    assert (second.keys, second.captions, second.report) == (first.keys, first.captions, first.report)
    assert np.array_equal(second.places, first.places) and np.array_equal(second.shapes, first.shapes)
    assert np.array_equal(second[1].image, first[1].image)


def test_an_index_of_other_content_is_not_used(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", picture(1)), ("1.txt", b"one")])
    come_to_rest(tmp_path)
    kept = tmp_path / "kept"
    before = open_shards(tar_shards(tmp_path), "", size=8, index_folder=kept)
    image = before[0].image
    # The same size and names, another picture and caption: only the time tells.
    write_tar(tmp_path / "a.tar", [("1.png", picture(2)), ("1.txt", b"two")])
    come_to_rest(tmp_path, 30)
    after = open_shards(tar_shards(tmp_path), "", size=8, index_folder=kept)
    assert (before.captions, after.captions) == (("one",), ("two",))
    assert not np.array_equal(image, after[0].image)
    assert len(list(kept.iterdir())) == 1


def test_an_index_of_a_file_that_had_just_changed_is_not_used(tmp_path: Path) -> None:
    """A change within the clock's resolution leaves size and time as they were."""
    path = tmp_path / "a.tar"
    write_tar(path, [("1.png", picture(1)), ("1.txt", b"one")])
    status = path.stat()
    open_shards(tar_shards(tmp_path), "", size=8)
    write_tar(path, [("1.png", picture(1)), ("1.txt", b"two")])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_shards(tar_shards(tmp_path), "", size=8).captions == ("two",)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": 1, "stamp": "other"}'])
def test_a_damaged_index_is_made_anew(content: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", picture(1)), ("1.txt", b"one")])
    come_to_rest(tmp_path)
    open_shards(tar_shards(tmp_path), "", size=8)
    (kept,) = (tmp_path / ".maxdiffusion").iterdir()
    kept.write_text(content)
    assert open_shards(tar_shards(tmp_path), "", size=8).captions == ("one",)
    assert json.loads(kept.read_text())["captions"] == ["one"]


def test_an_index_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", picture(1)), ("1.txt", b"one")])
    (tmp_path / "file").write_text("")
    source = open_shards(tar_shards(tmp_path), "", size=8, index_folder=tmp_path / "file")
    assert "every start decodes all of a.tar" in str(source.report)
    assert "data.index_folder" in str(source.report)


def test_a_picture_that_is_gone_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", picture(1)), ("1.txt", b"one")])
    source = open_shards(tar_shards(tmp_path), "", size=8)
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(BrokenDataError, match=r"a\.tar/1\.png could be read when training began"):
        source[0]


def test_paths(tmp_path: Path) -> None:
    for name in ("a-00.tar", "a-01.tar", "a-02.tar", "b.tar", ".hidden.tar", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.tar").write_bytes(b"")

    def names(path) -> list[str]:
        return list(find_shards(path, suffixes=(".tar",), kind="tar shards"))

    assert names(tmp_path) == ["a-00.tar", "a-01.tar", "a-02.tar", "b.tar", "deep/d.tar"]
    assert names(f"{tmp_path}/a-{{00..01}}.tar") == ["a-00.tar", "a-01.tar"]
    assert names(f"{tmp_path}/a-*.tar") == ["a-00.tar", "a-01.tar", "a-02.tar"]
    assert names([f"{tmp_path}/b.tar", f"{tmp_path}/a-00.tar"]) == ["b.tar", "a-00.tar"]
    for path, message in {
        f"{tmp_path}/a-{{00..03}}.tar": r"a-03\.tar is not there",
        f"{tmp_path}/x*.tar": "is not there",
        "gs://bucket/a.tar": "remote address: copy or mount it",
        f"{tmp_path}/a-{{00}}.tar": "is no range",
        f"{tmp_path}/a-{{2..1}}.tar": "counts down",
    }.items():
        with pytest.raises(UsageError, match=message):
            names(path)
    with pytest.raises(UsageError, match="named more than once"):
        names([f"{tmp_path}/b.tar", f"{tmp_path}/b.tar"])
    with pytest.raises(UsageError, match=r"has no Parquet files"):
        find_shards(tmp_path, suffixes=(".parquet",), kind="Parquet files")


def test_braces() -> None:
    assert braces("{a,b}-{8..10}.tar") == [f"{letter}-{number}.tar" for letter in "ab" for number in (8, 9, 10)]
    assert braces("{008..010}") == ["008", "009", "010"]
