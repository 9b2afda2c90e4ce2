"""Draws the README's picture: what the packaged model makes of ten captions, two pictures each, under the targets.

    python scripts/draw_shipped.py docs/images/pictures-64.png

The captions are of its training; pictures come as they are, from one seed.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np
from PIL import Image

from maxdiffusion.data.pictures import Pictures, pictures
from maxdiffusion.pipelines.generate import generate

CAPTIONS = (
    "a fox, noto style",
    "a red apple, flat style",
    "a red heart, fluent style",
    "a green apple, noto style",
    "an orange circle, flat style",
    "a glowing star, noto style",
    "a wine glass, flat style",
    "a pig face, flat style",
    "a sunflower, fluent style",
    "a rocket, twemoji style",
)
PICTURES = 2
SCALE = 2


def target(source: Pictures, text: str) -> np.ndarray:
    """The built-in picture of a caption."""
    return source.images[source.captions.index(text)]


def main() -> None:
    out = sys.argv[1]
    source = pictures()
    with tempfile.TemporaryDirectory() as folder:
        files = generate(CAPTIONS, num_images=PICTURES, out=folder).files
        made = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    rows = [[target(source, text) for text in CAPTIONS], *(made[index::PICTURES] for index in range(PICTURES))]
    grid = Image.fromarray(np.concatenate([np.concatenate(row, axis=1) for row in rows]))
    grid.resize((grid.width * SCALE, grid.height * SCALE), Image.Resampling.NEAREST).save(out, optimize=True)


if __name__ == "__main__":
    main()
