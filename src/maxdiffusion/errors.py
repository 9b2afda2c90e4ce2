"""Errors for users: one line that names the cause and the cure, with the nearest valid name where one exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

HOST_GONE = 3
"""Exit status of a host that ends because another one is gone, or has left."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, and of a training that Ctrl-C or SIGTERM stopped before its last step."""


class UsageError(ValueError):
    """What the user wrote cannot work; the message says why and what to write instead."""


class MeshError(UsageError):
    """A mesh cannot be built, or two meshes do not fit together."""


class RuleError(UsageError):
    """A logical axis rule names something that does not exist, or cannot be applied under `strict`."""


class IndivisibleError(RuleError):
    """A dimension does not divide by the mesh axes that it should be sharded over."""


class HostGoneError(UsageError):
    """Another host of a training is gone, or has left; the message names it."""


class MaxDiffusionWarning(UserWarning):
    """Something was chosen or changed for the user, and is said once."""


class LayoutWarning(MaxDiffusionWarning):
    """An array is not laid out as the rules wish; the message says why and what would change it."""


def nearest(name: str, options: Iterable[str]) -> str:
    """The sentence that helps after a misspelt name.

    Args:
        name: what was written.
        options: every valid name.

    Returns:
        `did you mean 'x'?` when one is close, else `valid: a, b, c`.
    """
    options = sorted(set(options))
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(options)}"
