"""Folders of captioned images: every way they can be broken is named, every kind of image becomes RGB."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.data import shards as module
from maxdiffusion.data.folder import folder_shard
from maxdiffusion.data.report import BrokenDataError
from maxdiffusion.data.shards import ShardedPictures, open_shards
from maxdiffusion.data.source import Source
from maxdiffusion.errors import MaxDiffusionWarning, UsageError


def folder(root: Path, **arguments) -> ShardedPictures:
    return open_shards([folder_shard(root)], str(root), **arguments)


def paint(path: Path, color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (12, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def captioned(path: Path, text: str = "a thing", **kwargs) -> None:
    paint(path, **kwargs)
    path.with_suffix(".txt").write_text(text)


def metadata(root: Path, *rows: object) -> None:
    root.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (root / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def reasons(root: Path) -> dict[str, str]:
    """What is broken, by name, in a folder that also holds something usable."""
    with pytest.warns(MaxDiffusionWarning, match="are left out"):
        source = folder(root, size=8, on_broken="skip")
    assert len(source) >= 1
    return {entry.name: entry.reason for entry in source.report.broken}


# --- captions ---------------------------------------------------------------------------------------------------------


def test_text_files_beside_images(tmp_path: Path):
    captioned(tmp_path / "b.png", "  a blue\n thing \n")
    captioned(tmp_path / "sub" / "a.JPG", "a \N{SNOWMAN}")
    source = folder(tmp_path, size=8)
    assert isinstance(source, Source)
    assert len(source) == 2
    assert [source[i].key for i in range(2)] == ["b.png", "sub/a.JPG"]
    assert [source[i].caption for i in range(2)] == ["a blue thing", "a \N{SNOWMAN}"]
    assert source[0].image.shape == (8, 8, 3) and source[0].image.dtype == np.uint8
    assert source.report.used == 2 and source.report.broken == ()


def test_metadata_names_images_and_captions(tmp_path: Path):
    paint(tmp_path / "x.png", (1, 2, 3))
    paint(tmp_path / "deep" / "y.webp", (250, 250, 250))
    metadata(tmp_path, {"file_name": "./deep/y.webp", "text": "why"}, "", {"file_name": "x.png", "text": "ex", "id": 3})
    source = folder(tmp_path, size=4)
    assert list(zip(source.keys, source.captions, strict=True)) == [("deep/y.webp", "why"), ("x.png", "ex")]
    assert source[1].image.tolist() == [[[1, 2, 3]] * 4] * 4


def test_metadata_wins_over_text_files(tmp_path: Path):
    captioned(tmp_path / "x.png", "from the text file")
    metadata(tmp_path, {"file_name": "x.png", "text": "from metadata"})
    assert folder(tmp_path, size=8)[0].caption == "from metadata"


def test_byte_order_marks_and_hidden_files_do_no_harm(tmp_path: Path):
    paint(tmp_path / "x.png")
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "._x.png").write_bytes(b"what another system leaves behind")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "y.png").write_bytes(b"no image")
    assert folder(tmp_path, size=8).captions == ("marked",)
    (tmp_path / "metadata.jsonl").write_bytes(b'\xef\xbb\xbf{"file_name": "x.png", "text": "ex"}\r\n')
    assert folder(tmp_path, size=8).captions == ("ex",)


def test_links_are_followed_each_folder_once(tmp_path: Path):
    captioned(tmp_path / "elsewhere" / "a.png", "linked")
    root = tmp_path / "root"
    root.mkdir()
    (root / "images").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)
    (root / "b.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    (root / "b.txt").write_text("by file")
    assert folder(root, size=8).keys == ("b.png", "images/a.png")


# --- what can be broken -----------------------------------------------------------------------------------------------


def test_broken_files_are_named_with_reasons(tmp_path: Path):
    captioned(tmp_path / "good.png")
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    for name, content in {
        "cut.png": buffer.getvalue()[: len(buffer.getvalue()) // 2],
        "empty.jpg": b"",
        "page.png": b"<html>not found</html>",
    }.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).with_suffix(".txt").write_text("a caption")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "gone")
    (tmp_path / "nowhere.txt").write_text("a caption")
    paint(tmp_path / "silent.png")
    captioned(tmp_path / "blank.png", " \n")
    captioned(tmp_path / "latin.png")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    found = reasons(tmp_path)
    assert sorted(found) == sorted(
        ["cut.png", "empty.jpg", "page.png", "nowhere.png", "silent.png", "blank.png", "latin.png"]
    )
    assert "cannot be decoded" in found["cut.png"]
    assert found["empty.jpg"] == "is an empty file"
    assert "is not an image" in found["page.png"]
    assert found["nowhere.png"] == "is a link to nothing"
    assert "neither metadata.jsonl nor silent.txt" in found["silent.png"]
    assert "blank.txt is empty" in found["blank.png"]
    assert "latin.txt cannot be read" in found["latin.png"]


def test_broken_metadata_is_named_by_line(tmp_path: Path):
    for name in ("a.png", "b.png", "c.png", "unlisted.png"):
        paint(tmp_path / name)
    metadata(
        tmp_path,
        {"file_name": "a.png", "text": "fine"},
        "{not json",
        {"file_name": "missing.png", "text": "there is no such thing"},
        {"file_name": "b.png", "caption": "wrong field"},
        ["a.png", "a list"],
        {"file_name": "../outside.png", "text": "not ours"},
        {"file_name": "c.png", "text": ""},
        {"file_name": "metadata.jsonl", "text": "no image"},
    )
    found = reasons(tmp_path)
    assert "not JSON" in found["metadata.jsonl line 2"]
    assert found["missing.png"] == "there is no such file"
    assert found["metadata.jsonl line 4"] == "needs a string 'text', has file_name, caption"
    assert "not a JSON object" in found["metadata.jsonl line 5"]
    assert "does not lie in" in found["metadata.jsonl line 6"]
    assert found["c.png"] == "its caption is empty"
    assert "is not an image" in found["metadata.jsonl"]
    assert "does not name it" in found["unlisted.png"] and "does not name it" in found["b.png"]
    assert len(found) == 9


def test_an_image_with_two_captions_is_ambiguous_twice_the_same_is_not(tmp_path: Path):
    for name in ("a.png", "b.png"):
        paint(tmp_path / name)
    metadata(
        tmp_path,
        {"file_name": "a.png", "text": "one"},
        {"file_name": "a.png", "text": "another"},
        {"file_name": "b.png", "text": "same"},
        {"file_name": "./b.png", "text": "same "},
    )
    with pytest.warns(MaxDiffusionWarning):
        source = folder(tmp_path, size=8, on_broken="skip")
    assert source.keys == ("b.png",)
    assert [str(entry) for entry in source.report.broken] == ["a.png: has different captions in metadata.jsonl"]
    assert any("listed more than once" in note and "b.png" in note for note in source.report.notes)


def test_notes_tell_what_may_not_be_meant(tmp_path: Path):
    captioned(tmp_path / "a.png", "twins", size=(4, 4))
    paint(tmp_path / "a.jpg")
    captioned(tmp_path / "b.png", "twins")
    (tmp_path / "orphan.txt").write_text("no image")
    source = folder(tmp_path, size=8)
    text = str(source.report)
    assert len(source) == 3
    assert "text files caption several images each: a.txt" in text
    assert "text files have no image: orphan.txt" in text
    assert "'twins' (3 times)" in text
    assert "smaller than 8 pixels: a.png" in text


def test_by_default_anything_broken_is_an_error_that_counts_and_names(tmp_path: Path):
    captioned(tmp_path / "good.png")
    for number in range(12):
        paint(tmp_path / f"silent{number:02}.png")
    with pytest.raises(BrokenDataError) as caught:
        folder(tmp_path, size=8)
    message = str(caught.value)
    assert "12 of 13 entries" in message and "silent00.png: no caption" in message
    assert "and 2 more" in message and "silent11" not in message
    assert "on_broken='skip'" in message


def test_nothing_usable_is_an_error_even_when_skipping(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no usable image .* it has none"):
        folder(tmp_path, size=8)
    paint(tmp_path / "silent.png")
    with pytest.raises(UsageError, match=r"all 1 entries are broken: silent\.png"):
        folder(tmp_path, size=8, on_broken="skip")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"size": 0}, "size is 0"), ({"on_broken": "skipp"}, "did you mean 'skip'")],
)
def test_mistaken_arguments(tmp_path: Path, arguments: dict, message: str):
    captioned(tmp_path / "good.png")
    with pytest.raises(UsageError, match=message):
        folder(tmp_path, **{"size": 8, **arguments})


def test_a_root_that_is_not_there_or_no_folder(tmp_path: Path):
    with pytest.raises(UsageError, match="is not there"):
        folder(tmp_path / "absent", size=8)
    paint(tmp_path / "file.png")
    with pytest.raises(UsageError, match="is a file"):
        folder(tmp_path / "file.png", size=8)


# --- kinds of images --------------------------------------------------------------------------------------------------


def only(root: Path, size: int = 8) -> np.ndarray:
    (next(path for path in root.iterdir() if path.is_file() and path.suffix != ".txt")).with_suffix(".txt").write_text(
        "a thing"
    )
    return folder(root, size=size)[0].image


def test_shorter_side_is_scaled_and_the_middle_kept(tmp_path: Path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 72, 3), np.uint8))
    noise.save(tmp_path / "wide.png")
    expected = np.asarray(noise.resize((24, 8), Image.Resampling.LANCZOS).crop((8, 0, 16, 8)), int)
    assert np.abs(only(tmp_path) - expected).max() <= 1, "8-bit rounding between the two passes may come in other order"
    noise.transpose(Image.Transpose.TRANSPOSE).save(tmp_path / "wide.png")
    assert np.abs(only(tmp_path) - expected.swapaxes(0, 1)).max() <= 1


def test_exif_orientation_is_honoured(tmp_path: Path):
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    image = only(tmp_path)
    assert image[:3].max() < 10 and image[5:].min() > 245


def test_transparency_is_laid_on_white(tmp_path: Path):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (only(tmp_path) == 255).all()
    Image.new("RGBA", (8, 8), (255, 0, 0, 127)).save(tmp_path / "clear.png")
    # 127 of 255 opaque: red stays, the others are white times the rest, within the rounding of the blend
    image = only(tmp_path)
    assert (image[..., 0] == 255).all() and np.abs(image[..., 1:].astype(int) - 128).max() <= 1


def test_palettes_with_a_transparent_entry(tmp_path: Path):
    picture = Image.new("P", (8, 8), 1)
    picture.putpalette([0, 0, 0, 10, 200, 30])
    picture.paste(0, (0, 0, 8, 4))
    picture.save(tmp_path / "palette.png", transparency=0)
    image = only(tmp_path)
    assert (image[:4] == 255).all() and (image[4:] == (10, 200, 30)).all()


def test_sixteen_bits_of_grey_are_scaled_not_clipped(tmp_path: Path):
    pixels = np.full((8, 8), 0x8080, np.uint16)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    assert (only(tmp_path) == 0x80).all()


@pytest.mark.parametrize(("mode", "color", "expected"), [("L", 77, 77), ("1", 1, 255), ("CMYK", (0, 0, 0, 255), 0)])
def test_grey_bilevel_and_cmyk(tmp_path: Path, mode: str, color: object, expected: int):
    Image.new(mode, (8, 8), color).save(tmp_path / "image.tiff")  # type: ignore[arg-type]
    assert (only(tmp_path) == expected).all()


def test_values_without_a_known_range_are_refused(tmp_path: Path):
    captioned(tmp_path / "good.png")
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "float.tiff")
    Image.fromarray(np.full((8, 8), 1 << 20, np.int32)).save(tmp_path / "wide.tiff")
    for name in ("float", "wide"):
        (tmp_path / f"{name}.txt").write_text("a thing")
    found = reasons(tmp_path)
    assert "floating-point" in found["float.tiff"] and "32-bit" in found["wide.tiff"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_large_folders_are_read_again_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        captioned(tmp_path / f"{number}.png", f"number {number}", color=(number, 80 * number, 9))
    kept = folder(tmp_path, size=8)
    monkeypatch.setattr(module, "KEEP_BYTES", 0)
    read = folder(tmp_path, size=8)
    assert kept.kept is not None and read.kept is None
    assert all(np.array_equal(kept[i].image, read[i].image) and kept[i].key == read[i].key for i in range(3))
    (tmp_path / "1.png").unlink()
    with pytest.raises(BrokenDataError, match=r"1\.png could be read when training began"):
        read[1]
