"""The trained models that come with the package: `generate` takes them by name, without a download or a training."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.run_files import PACKED_WEIGHTS

FOLDER = Path(str(files("maxdiffusion"))) / "shipped"
"""Holds them, each in a folder of its name, packed (see `packed`)."""

DEFAULT_MODEL = "pictures-64"
"""What `generate` paints with where nothing else is named."""


def shipped_model(place: str | os.PathLike[str]) -> Path | None:
    """The folder of the packaged model of that name; None where there is none. A folder here is `./NAME`."""
    name = os.fspath(place)
    if not name or "/" in name or not (FOLDER / name / PACKED_WEIGHTS).is_file():
        return None
    return FOLDER / name


def refuse_shipped(place: str | os.PathLike[str]) -> None:
    """Refuses the name of a packaged model where a run with its files is needed.

    Raises:
        UsageError: it is one, and no folder of that name is here.
    """
    if shipped_model(place) and not as_path(place).exists():
        raise UsageError(
            f"'{place}' is a packaged model, which `maxdiffusion generate` alone takes (what it was measured by is in "
            f"{FOLDER / place / 'made.json'}): give the folder of a run"
        )


def shipped_names() -> tuple[str, ...]:
    """Names of the packaged models."""
    return tuple(sorted(file.parent.name for file in FOLDER.glob(f"*/{PACKED_WEIGHTS}")))
