"""What was found in a set of pictures: how many can be used, which cannot and why, and what may not be meant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from maxdiffusion.errors import MaxDiffusionWarning, UsageError, nearest

OnBroken = Literal["skip", "error"]
NAMED_IN_MESSAGE = 10


class BrokenDataError(UsageError):
    """Some entries of a set of pictures cannot be used, and `on_broken` is "error"."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One entry that cannot be used.

    Attributes:
        name: the file, relative to its folder; the shard and what it is called there; or the line of a list.
        reason: what is wrong with it, without the name.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        used: number of images with a caption that make up the source.
        broken: entries that cannot be used, in the order of their names.
        notes: sentences on what works but may not be meant: images listed twice, one caption for many images, text
            files without an image, images smaller than the size asked for.
    """

    used: int
    broken: tuple[Broken, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.used} images with captions", *self.notes]
        if self.broken:
            lines.append(f"{len(self.broken)} cannot be used: {name_some(self.broken)}")
        return "; ".join(lines)

    def judge(self, where: str, on_broken: OnBroken) -> None:
        """Raises or warns as `on_broken` says; an empty result is always an error.

        Args:
            where: the folder or files, for the message.
            on_broken: whether broken entries are an error or a warning.

        Raises:
            BrokenDataError: something cannot be used and `on_broken` is "error".
            UsageError: nothing can be used.
        """
        if self.broken and on_broken == "error":
            raise BrokenDataError(
                f"{len(self.broken)} of {len(self.broken) + self.used} entries in {where} cannot be used: "
                f"{name_some(self.broken)}. Mend or remove them, or leave them out with on_broken='skip'"
            )
        if not self.used:
            why = (
                f"all {len(self.broken)} entries are broken: {name_some(self.broken)}" if self.broken else "it has none"
            )
            raise UsageError(f"no usable image with a caption in {where}: {why}")
        if self.broken:
            warnings.warn(
                f"{len(self.broken)} of {len(self.broken) + self.used} entries in {where} are left out: "
                f"{name_some(self.broken)}",
                MaxDiffusionWarning,
                stacklevel=3,
            )


def check_on_broken(on_broken: str) -> None:
    """Raises UsageError, with the nearest valid word, for anything but `skip` and `error`."""
    if on_broken not in get_args(OnBroken):
        raise UsageError(f"unknown on_broken '{on_broken}': {nearest(on_broken, get_args(OnBroken))}")


def name_some(entries: Sequence[object]) -> str:
    """The first ten, and how many more there are."""
    more = f", and {len(entries) - NAMED_IN_MESSAGE} more" if len(entries) > NAMED_IN_MESSAGE else ""
    return ", ".join(str(entry) for entry in entries[:NAMED_IN_MESSAGE]) + more
