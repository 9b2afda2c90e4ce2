"""PNG files that carry how they were made, and never replace a file that is there."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path, is_remote


def write_png(path: str | Path, pixels: UInt8[np.ndarray, "height width 3"], text: Mapping[str, object]) -> Path:
    """Writes a picture to `path`, or where that exists to `name-2.png`, `name-3.png`, ...

    Args:
        path: the file; its folder is made.
        pixels: RGB.
        text: keys (Latin-1) and values of the file's text chunks, such as prompt and seed.

    Returns:
        The file that was written.

    Raises:
        UsageError: the folder cannot be made or written to.
    """
    path = as_path(path)
    info = PngInfo()
    for key, value in text.items():
        info.add_itxt(key, str(value))
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, format="PNG", pnginfo=info)
    number = 1
    target = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                if is_remote(target):  # there, a file cannot be opened on the condition that it is new
                    if target.exists():
                        raise FileExistsError
                    target.write_bytes(encoded.getvalue())
                    return target
                with target.open("xb") as file:
                    file.write(encoded.getvalue())
                return target
            except FileExistsError:
                number += 1
                target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}; choose another folder") from error


def read_text(path: str | Path) -> dict[str, str]:
    """The text chunks of a PNG file."""
    with Image.open(path) as picture:
        picture.load()
        return {key: str(value) for key, value in getattr(picture, "text", {}).items()}


def picture_grid(
    pictures: UInt8[np.ndarray, "rows columns height width 3"], *, gap: int = 2
) -> UInt8[np.ndarray, "h w 3"]:
    """Pictures in rows and columns, on white, with `gap` pixels between them."""
    padded = np.pad(pictures, ((0, 0), (0, 0), (gap, 0), (gap, 0), (0, 0)), constant_values=255)
    joined = rearrange(padded, "r c h w d -> (r h) (c w) d")
    return np.pad(joined, ((0, gap), (0, gap), (0, 0)), constant_values=255)


def slug(text: str, longest: int = 60) -> str:
    """A text as a part of a file's name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-") or "picture"
