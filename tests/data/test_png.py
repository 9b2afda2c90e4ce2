"""PNG files say how they were made and never replace one another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.data.png import picture_grid, read_text, slug, write_png
from maxdiffusion.errors import UsageError


def test_pixels_and_text_come_back(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    path = write_png(tmp_path / "new" / "a.png", pixels, {"prompt": "ein grüner Apfel 🍏", "seed": 7})
    assert path == tmp_path / "new" / "a.png"
    np.testing.assert_array_equal(np.asarray(Image.open(path)), pixels)
    assert read_text(path) == {"prompt": "ein grüner Apfel 🍏", "seed": "7"}


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    black, white = (np.full((2, 2, 3), value, np.uint8) for value in (0, 255))
    names = [write_png(tmp_path / "a.png", pixels, {}).name for pixels in (black, white, white)]
    assert names == ["a.png", "a-2.png", "a-3.png"]
    assert not np.asarray(Image.open(tmp_path / "a.png")).any()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*choose another folder"):
        write_png(tmp_path / "file" / "a.png", np.zeros((2, 2, 3), np.uint8), {})


def test_a_grid_has_rows_and_columns_with_gaps() -> None:
    pictures = np.zeros((2, 3, 4, 5, 3), np.uint8)
    pictures[1, 2] = 100
    grid = picture_grid(pictures, gap=2)
    assert grid.shape == (2 * 4 + 3 * 2, 3 * 5 + 4 * 2, 3)
    assert (grid[8:12, 16:21] == 100).all()
    assert (grid[:2] == 255).all() and (grid[:, -2:] == 255).all()


def test_a_slug_is_a_safe_name() -> None:
    assert slug("A red apple, flat style!") == "a-red-apple-flat-style"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("🍏") == "picture"
    assert len(slug("word " * 50)) <= 60
