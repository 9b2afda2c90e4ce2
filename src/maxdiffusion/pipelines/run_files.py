"""Names of what a run's folder holds beside its checkpoints, for whoever reads it without jax."""

from __future__ import annotations

import re
from pathlib import Path

METRICS = "metrics.jsonl"
"""A line every few steps."""

SAMPLES = "samples"
"""Folder of the grids of pictures, `step-000500.png`."""

EVALUATION = "evaluation"
"""Stem of the files that an evaluation writes."""

REPORT = "report.html"
"""One page about all of it."""

DIVERGED = "diverged"
"""Folder with the state before a step that was not finite, in a checkpoint of its own."""

BAD_STEP = "bad-step.json"
"""File in there that says what was wrong."""

PACKED_WEIGHTS = "weights.safetensors"
"""The weights of a packed model, which is a run without the state of its training."""


def grids_in(samples: Path) -> list[Path]:
    """The grids in a folder of samples, oldest first; by their names, for files of an object store have no times."""
    return sorted(samples.glob("step-*.png"), key=grid_number)


def grid_number(path: Path) -> tuple[int, int]:
    """Step of a grid, and which of that step it is: `step-000500-2.png` is the second, of a run that was resumed."""
    found = re.fullmatch(r"step-(\d+)(?:-(\d+))?\.png", path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (0, 0)
