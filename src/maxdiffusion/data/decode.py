"""The bytes of an image file become 8-bit RGB of a given size, or a reason why they cannot."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})

# What Pillow raises on files that are cut short, mangled or no images at all.
_DECODING_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


def decode(encoded: bytes) -> Image.Image | str:
    """The picture in RGB, or the reason why it cannot be had.

    It is turned upright (EXIF) and laid on white where it is transparent. Sixteen-bit, grey, palette and CMYK images
    become 8-bit RGB; of an animation the first frame is taken. Colour profiles are not applied.
    """
    if not encoded:
        return "is an empty file"
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            opened.load()
            return _to_rgb(ImageOps.exif_transpose(opened))
    except Image.UnidentifiedImageError:
        return "is not an image, or of a kind that cannot be read"
    except _DECODING_ERRORS as error:
        return f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"


def fit(picture: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """The picture scaled until it covers the size, and cropped in the middle; the same every time."""
    return np.asarray(ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS, centering=(0.5, 0.5)))


def _to_rgb(picture: Image.Image) -> Image.Image:
    """Eight-bit RGB on white."""
    if picture.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them at 255
        grey = np.asarray(picture).astype(np.float64) / 257
        if grey.max() > 255 or grey.min() < 0:
            raise ValueError("32-bit grey values: save it with 8 or 16 bits")
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("floating-point grey values without a range: save it with 8 or 16 bits")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")
