"""Members of a tar file make samples by their key; what is wrong with one is said with its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from maxdiffusion.data.shards import ShardedPictures, open_shards
from maxdiffusion.data.webdataset import split, tar_shards
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from tests.data.formats import picture, write_tar


def opened(path: Path, **arguments) -> ShardedPictures:
    return open_shards(tar_shards(path, **arguments), str(path), size=8, on_broken="skip")


def test_keys_end_at_the_first_dot_of_the_name() -> None:
    assert split("a.b/c.d.PNG") == ("a.b/c", ".d.png")
    assert split("plain") == ("plain", "")


def test_captions_of_text_and_json(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            ("d/1.jpg", picture(1)),
            ("d/1.json", json.dumps({"text": "from json"}).encode()),
            ("d/1.txt", b"from\ntext"),
            ("d/2.txt", b"before its picture"),
            ("d/2.png", picture(2)),
            ("d/2.seg.png", picture(3)),
            ("d/3.JSON", json.dumps({"text": "json", "url": "u"}).encode()),
            ("d/3.PNG", picture(3)),
        ],
    )
    source = opened(tmp_path)
    assert source.captions == ("from text", "before its picture", "json")
    assert source.keys == ("a.tar/d/1.jpg", "a.tar/d/2.png", "a.tar/d/3.PNG")


def test_what_is_wrong_with_a_sample(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            ("good.png", picture(1)),
            ("good.txt", b"good"),
            ("two.png", picture(1)),
            ("two.jpg", picture(2)),
            ("two.txt", b"two"),
            ("silent.png", picture(1)),
            ("field.png", picture(1)),
            ("field.json", json.dumps({"caption": "x", "width": 3}).encode()),
            ("bad.png", picture(1)),
            ("bad.json", b"{"),
            ("latin.png", picture(1)),
            ("latin.txt", b"caf\xe9"),
            ("bare.txt", b"no picture"),
        ],
    )
    with pytest.warns(MaxDiffusionWarning, match="5 of 6"):
        source = opened(tmp_path)
    found = {entry.name: entry.reason for entry in source.report.broken}
    assert "has 2 images (two.png, two.jpg)" in found["a.tar/two.png"]
    assert "neither a .txt nor a .json" in found["a.tar/silent.png"]
    assert "field.json has no text 'text' (valid: caption): set data.caption_field" in found["a.tar/field.png"]
    assert "bad.json cannot be read" in found["a.tar/bad.png"]
    assert "latin.txt cannot be read" in found["a.tar/latin.png"]
    assert source.report.notes == ("a.tar: 1 keys have no image: bare",)
    with pytest.warns(MaxDiffusionWarning):
        assert opened(tmp_path, caption_field="caption").captions == ("good", "x")


@pytest.mark.parametrize("where", ["data", "header"])
def test_a_shard_that_is_cut_short_gives_what_is_whole_and_is_named(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    noise = picture(2, 40, 40)
    write_tar(path, [("1.txt", b"one"), ("1.png", picture(1)), ("2.txt", b"two"), ("2.png", noise)])
    whole = path.read_bytes()
    start = whole.index(noise)
    path.write_bytes(whole[: start + 100] if where == "data" else whole[: start - 300])
    with pytest.warns(MaxDiffusionWarning, match=r"a\.tar"):
        source = opened(path)
    assert source.captions == ("one",) and len(source.report.broken) == 1
    reason = source.report.broken[0].reason
    assert ("cannot be read after" if where == "data" else "cut short or damaged at byte") in reason


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.txt", b"one"), ("1.png", picture(1))])
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(UsageError, match=r"b\.tar\.gz is compressed, .*unpack it to a \.tar"):
        opened(tmp_path)
