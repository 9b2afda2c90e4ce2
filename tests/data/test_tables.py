"""Arrow and Parquet files: columns by name, cells of every kind, and row groups that do not fit into memory."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from maxdiffusion.data import tables as module
from maxdiffusion.data.shards import ShardedPictures, open_shards
from maxdiffusion.data.tables import Columns, Groups, arrow_shards, parquet_shards
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from tests.data.formats import picture, some_files, write_arrow, write_parquet

pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


def opened(shards, **arguments) -> ShardedPictures:
    return open_shards(shards, "here", **{"size": 8, **arguments})


def test_columns_are_asked_for_by_name_and_the_nearest_is_told(tmp_path: Path) -> None:
    pq.write_table(
        pyarrow.table({"jpg": [picture(1)], "caption": ["one"], "number": [3], "other": ["x"]}), tmp_path / "a.parquet"
    )
    assert opened(parquet_shards(tmp_path, columns=Columns(image="jpg", caption="caption"))).captions == ("one",)
    for image, caption, message in (
        ("jgp", "caption", r"a\.parquet has no column 'jgp': did you mean 'jpg'\?; set data\.image_field"),
        ("jpg", "captoin", r"no column 'captoin': did you mean 'caption'\?; set data\.caption_field"),
        ("jpg", "number", "column 'number' of .* holds int64, not texts: valid: caption, other"),
        ("other", "caption", "holds string, not pictures .*: valid: jpg"),
    ):
        with pytest.raises(UsageError, match=message):
            opened(parquet_shards(tmp_path, columns=Columns(image=image, caption=caption)))


def test_cells_without_bytes_name_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(picture(1))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    cells = [
        {"bytes": None, "path": "1.png"},
        {"bytes": None, "path": "gone.png"},
        {"bytes": None, "path": None},
        None,
    ]
    table = pyarrow.table({"image": pyarrow.array(cells, kind), "text": ["a", "b", "c", "d"]})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.warns(MaxDiffusionWarning, match="3 of 4"):
        source = opened(arrow_shards(tmp_path), on_broken="skip")
    assert source.captions == ("a",)
    assert [entry.reason for entry in source.report.broken] == [
        "has no bytes, and its file gone.png cannot be read (No such file or directory)",
        "has neither bytes nor a path",
        "has no picture",
    ]


def test_a_saved_dataset_names_its_files(tmp_path: Path) -> None:
    write_arrow(tmp_path, some_files())
    (tmp_path / "data-stray.arrow").write_bytes(b"left behind, and not named")
    assert len(opened(arrow_shards(tmp_path))) == 5
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(UsageError, match="call flatten_indices"):
        arrow_shards(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(UsageError, match=r"gone\.arrow, which state\.json names, is not there"):
        arrow_shards(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"holds the splits train, test: write data\.path=.*/train"):
        arrow_shards(tmp_path)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, shards in (("a.arrow", arrow_shards), ("a.parquet", parquet_shards)):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(UsageError, match=f"{name} is no .* file, or damaged"):
            opened(shards(tmp_path))


def test_row_groups_that_do_not_fit_are_read_again_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path, some_files())
    whole = opened(parquet_shards(tmp_path))
    assert not any("row groups" in note for note in whole.report.notes)
    monkeypatch.setattr(module, "GROUP_CACHE_BYTES", 1)
    source = opened(parquet_shards(tmp_path), index_folder=tmp_path / "other")
    assert any("take data.source=arrow" in note for note in source.report.notes)
    assert all((source[row].image == whole[row].image).all() for row in (4, 0, 3, 1, 2, 0))


def test_groups_keep_what_was_used_last() -> None:
    groups, loaded = Groups(limit=20), []

    def get(number: int):
        def load():
            loaded.append(number)
            return pyarrow.array([number], pyarrow.int64())

        return groups.get(("file", number), load)

    for number in (0, 1, 0, 2, 0, 1):
        get(number)
    assert loaded == [0, 1, 2, 1], "two of eight bytes fit; number 1 was used least lately when 2 came"


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for shards in (arrow_shards, parquet_shards):
        with pytest.raises(UsageError, match=r"need pyarrow: pip install 'maxdiffusion\[data\]'"):
            shards(tmp_path)
