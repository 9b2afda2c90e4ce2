"""Grids of pictures at fixed prompts and seeds, so that one can watch a model learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxdiffusion import __version__
from maxdiffusion.config.schema import SampleSection
from maxdiffusion.data.png import picture_grid, slug, write_png
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.pipelines.text_to_image import Sampler
from maxdiffusion.train.trackers import Tracker


@dataclass(frozen=True, kw_only=True)
class SampleGrid:
    """A row for each prompt, a column for each picture; the noise is that of `generate` with the same seed.

    Attributes:
        sampler: makes the pictures.
        tokenizer: of the captions.
        prompts: fixed for the whole run.
        section: seed, pictures for each prompt, and what else is told in the file.
        trackers: are given each prompt's row, under a name of its own.
    """

    sampler: Sampler
    tokenizer: WordTokenizer
    prompts: tuple[str, ...]
    section: SampleSection
    trackers: Sequence[Tracker] = ()

    def draw(self, params: Any, path: Path, step: int) -> Path:
        """Draws the grid of these weights into a PNG file; every process takes part, the first one writes.

        Args:
            params: weights, laid out on the mesh.
            path: of the file; where it exists the next free number is added.
            step: of the training, for the file's text.

        Returns:
            The file.
        """
        section = self.section
        pictures = self.sampler.pictures(
            params, self.tokenizer, self.prompts, num_images=section.num_per_prompt, seed=section.seed
        )
        if jax.process_index():
            return path
        for number, (prompt, row) in enumerate(zip(self.prompts, pictures, strict=True)):
            for tracker in self.trackers:
                tracker.picture(f"samples/{number:02}-{slug(prompt)}", step, picture_grid(row[None]), prompt)
        text = {
            "prompts": "\n".join(self.prompts),
            "seed": section.seed,
            "step": step,
            "solver": section.solver,
            "steps": section.steps,
            "guidance_scale": section.guidance_scale,
            "maxdiffusion": __version__,
            "jax": jax.__version__,
        }
        return write_png(path, picture_grid(pictures), text)
