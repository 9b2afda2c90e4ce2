"""The same captioned pictures in every format, written by the test itself."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from maxdiffusion.data.folder import folder_shard
from maxdiffusion.data.index import Shard
from maxdiffusion.data.records import record_shards, write_records
from maxdiffusion.data.tables import arrow_shards, parquet_shards
from maxdiffusion.data.webdataset import tar_shards

Files = Sequence[tuple[str, str, bytes]]
"""Key, caption and bytes of an image file."""


def picture(number: int, width: int = 12, height: int = 8) -> bytes:
    """A PNG of coloured noise; no two numbers give the same."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def some_files(number: int = 5) -> list[tuple[str, str, bytes]]:
    """Pictures of different shapes."""
    return [
        (f"p{row:02}.png", f"picture number {row}", picture(row, 8 + row % 3 * 4, 12 - row % 2 * 2))
        for row in range(number)
    ]


def write_folder(root: Path, files: Files) -> None:
    for key, caption, encoded in files:
        (root / key).write_bytes(encoded)
        (root / key).with_suffix(".txt").write_text(caption)


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def write_webdataset(root: Path, files: Files) -> None:
    for shard, rows in enumerate((files[:2], files[2:])):
        members = [
            member
            for row, (key, caption, encoded) in enumerate(rows)
            for member in (
                (key, encoded),
                (f"{Path(key).stem}.json", json.dumps({"text": caption}).encode())
                if row % 2
                else (f"{Path(key).stem}.txt", caption.encode()),
            )
        ]
        write_tar(root / f"train-{shard:03}.tar", members)


def table(files: Files):
    import pyarrow

    images = [{"bytes": encoded, "path": key} for key, _, encoded in files]
    captions = [caption for _, caption, _ in files]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    return pyarrow.table({"image": pyarrow.array(images, kind), "text": pyarrow.array(captions, pyarrow.string())})


def write_parquet(root: Path, files: Files) -> None:
    import pyarrow.parquet

    (root / "data").mkdir()
    for shard, rows in enumerate((files[:3], files[3:])):
        pyarrow.parquet.write_table(table(rows), root / "data" / f"train-{shard}.parquet", row_group_size=2)


def write_arrow(root: Path, files: Files) -> None:
    """What `Dataset.save_to_disk` leaves, as far as it is read."""
    import pyarrow

    names = []
    for shard, rows in enumerate((files[:3], files[3:])):
        names.append(f"data-{shard:05}-of-00002.arrow")
        found = table(rows)
        with pyarrow.ipc.new_stream(root / names[-1], found.schema) as writer:
            writer.write_table(found, max_chunksize=2)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (root / "dataset_info.json").write_text("{}")


def write_array_record(root: Path, files: Files) -> None:
    for shard, rows in enumerate((files[:1], files[1:])):
        write_records(root / f"train-{shard}.array_record", rows)


FORMATS: dict[str, tuple[Callable[[Path, Files], None], Callable[[Path], Sequence[Shard]]]] = {
    "folder": (write_folder, lambda root: [folder_shard(root)]),
    "webdataset": (write_webdataset, tar_shards),
    "parquet": (write_parquet, parquet_shards),
    "arrow": (write_arrow, arrow_shards),
    "array_record": (write_array_record, record_shards),
}


def come_to_rest(root: Path, seconds: float = 60.0) -> None:
    """Moves the times of all files back, as if they had been there for a while."""
    for path in root.rglob("*"):
        if path.is_file():
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))
