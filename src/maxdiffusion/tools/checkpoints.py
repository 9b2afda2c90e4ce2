"""The checkpoints of a run as rows and as one whole description, from their files alone: no device is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path, is_remote
from maxdiffusion.pipelines.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    checkpoint_folder,
    checkpoint_steps,
    flaw_of,
    parts_in,
    read_manifest,
    sizes_in,
    split_place,
    unfinished_steps,
)

OLD = "of an older version, which did not write down shapes, dtypes and mesh"
"""What is said of a checkpoint without a manifest."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a checkpoint.

    Attributes:
        name: such as params.
        bytes: of its files.
        arrays: how many, None where nothing says so.
        elements: of all its arrays together.
        dtypes: how many arrays have which dtype.
    """

    name: str
    bytes: int
    arrays: int | None
    elements: int | None
    dtypes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Described:
    """One checkpoint.

    Attributes:
        step: optimizer steps done; None for an older folder that was copied elsewhere under another name.
        folder: where it lies.
        flaw: why it is not whole; None if it is.
        note: what else is to be known.
        written: seconds since 1970.
        bytes: of all its files.
        parts: by size.
        parameters: of the model.
        mesh: on which it was written, such as `data=4,tensor=2`.
        manifest: everything that it says of itself; None for an older version.
    """

    step: int | None
    folder: Path
    flaw: str | None
    note: str
    written: float
    bytes: int
    parts: tuple[Part, ...]
    parameters: int | None
    mesh: str | None
    manifest: Mapping[str, Any] | None

    @property
    def dtypes(self) -> dict[str, int]:
        """How many arrays of all parts have which dtype."""
        counts: dict[str, int] = {}
        for part in self.parts:
            for dtype, number in part.dtypes.items():
                counts[dtype] = counts.get(dtype, 0) + number
        return counts


def describe_folder(folder: Path) -> Described:
    """What is known of the folder of a checkpoint, wherever it lies."""
    flaw = flaw_of(folder)
    try:
        manifest = read_manifest(folder)
    except UsageError:  # what is wrong with it stands in `flaw`
        manifest = None
    old = manifest is None and not (folder / MANIFEST).exists()
    sizes = sizes_in(folder)
    leaves = manifest["parts"] if manifest else {}
    parts = tuple(_part(name, sizes, leaves.get(name)) for name in sorted(parts_in(folder)))
    name = int(folder.name) if folder.name.isdigit() else None
    return Described(
        step=manifest["step"] if manifest else name,
        folder=folder,
        flaw=flaw,
        note=OLD if old else "",
        written=manifest["written"] if manifest else _changed(folder),
        bytes=sum(sizes.values()),
        parts=parts,
        parameters=manifest["parameters"] if manifest else None,
        mesh=_mesh(manifest["mesh"]) if manifest else None,
        manifest=manifest,
    )


def list_checkpoints(run: str | Path) -> tuple[list[Described], list[int]]:
    """The checkpoints of a run, the oldest first, and the steps of those that were begun and never finished.

    Raises:
        UsageError: there is no such folder, or it is no run.
    """
    folder = as_path(run)
    if not folder.is_dir():
        raise UsageError(f"there is no folder '{run}': give the folder that `maxdiffusion train` wrote")
    if not (folder / CHECKPOINTS).is_dir():
        raise UsageError(f"'{run}' has no checkpoints: give the folder that `maxdiffusion train` wrote")
    described = [describe_folder(checkpoint_folder(folder, step)) for step in checkpoint_steps(folder)]
    return described, unfinished_steps(folder)


def find_checkpoint(place: str) -> Path:
    """The folder of the checkpoint that `RUN`, `RUN@STEP` or a checkpoint's own folder names.

    Raises:
        UsageError: there is none.
    """
    whole = as_path(place)
    if (whole / MANIFEST).exists() or (whole / "params").is_dir():
        return whole
    run, step = split_place(place)
    steps = checkpoint_steps(run) if step is None else [step]
    if not steps:
        raise UsageError(f"'{place}' is no run with checkpoints and no checkpoint: write RUN, RUN@STEP or its folder")
    return checkpoint_folder(run, steps[-1])


def _part(name: str, sizes: Mapping[str, int], leaves: Mapping[str, Any] | None) -> Part:
    dtypes: dict[str, int] = {}
    elements = 0
    for leaf in (leaves or {}).values():
        dtypes[leaf["dtype"]] = dtypes.get(leaf["dtype"], 0) + 1
        count = 1
        for size in leaf["shape"]:
            count *= size
        elements += count
    return Part(
        name=name,
        bytes=sum(size for path, size in sizes.items() if path.startswith(f"{name}/")),
        arrays=None if leaves is None else len(leaves),
        elements=None if leaves is None else elements,
        dtypes=dtypes,
    )


def _mesh(mesh: Mapping[str, Any]) -> str:
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh["axes"].items() if size > 1) or "one device"
    devices = "" if mesh["devices"] == 1 else f" ({mesh['devices']} x {mesh['device_kind']})"
    return f"{sizes}{devices}"


def _changed(folder: Path) -> float:
    """When a folder was changed last; an object store does not know that of folders."""
    if is_remote(folder):
        return time.time()
    return folder.stat().st_mtime
