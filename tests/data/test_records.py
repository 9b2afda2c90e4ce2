"""ArrayRecord files of header and image: written whole, read at random, and every bad record named."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.data.records import record_shards, write_records
from maxdiffusion.data.shards import open_shards
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from tests.data.formats import picture, some_files

module = pytest.importorskip("array_record.python.array_record_module")


def test_a_written_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"

    def failing():
        yield from some_files(2)
        raise RuntimeError("the third cannot be had")

    with pytest.raises(RuntimeError):
        write_records(path, failing())
    assert not path.exists()
    assert write_records(path, some_files(3)) == 3
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".tmp")] == ["a.array_record"]
    assert open_shards(record_shards(tmp_path), "", size=8).keys == tuple(
        f"a.array_record/{key}" for key, _, _ in some_files(3)
    )


def test_bad_records_are_named(tmp_path: Path) -> None:
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    header = b'{"key": "one", "text": "a caption"}'
    good = len(header).to_bytes(4, "little") + header + picture(1)
    missing = b'{"key": "two"}'
    for record in (good, b"no", b"\xff\xff\xff\x00{}", len(missing).to_bytes(4, "little") + missing, good):
        writer.write(record)
    writer.close()
    with pytest.warns(MaxDiffusionWarning, match="4 of 5"):
        source = open_shards(record_shards(tmp_path), "", size=8, on_broken="skip")
    assert source.captions == ("a caption",)
    assert {entry.name: entry.reason for entry in source.report.broken} == {
        "a.array_record/record 1": "is too short for a header",
        "a.array_record/record 2": "its header needs the texts 'key' and 'text'",
        "a.array_record/record 3": "its header needs the texts 'key' and 'text'",
        "a.array_record/record 4": "its key 'one' is that of an earlier record",
    }


def test_reading_from_many_threads(tmp_path: Path) -> None:
    """The one reader of a file serves all threads."""
    from concurrent.futures import ThreadPoolExecutor

    write_records(tmp_path / "a.array_record", some_files(20))
    (shard,) = record_shards(tmp_path)
    rows = np.random.default_rng(0).integers(0, 20, 200)
    files = some_files(20)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: shard.read(files[row][0], (int(row), 0)), rows))
    assert found == [files[row][2] for row in rows]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.array_record").write_bytes(b"nothing of the kind")
    with pytest.raises(UsageError, match=r"a\.array_record: has no records, or is no ArrayRecord file"):
        open_shards(record_shards(tmp_path), "", size=8)


def test_without_array_record_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("array_record"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"need array_record: pip install 'maxdiffusion\[data\]'"):
        record_shards(tmp_path)
