"""What is said once: choices made for the user, however often a program is traced."""

from __future__ import annotations

import functools
import logging


@functools.lru_cache(maxsize=4096)
def say_once(log: logging.Logger, text: str, level: int = logging.WARNING) -> None:
    """Logs a text that this process has not logged yet.

    Args:
        log: the module's logger.
        text: one line: what was chosen, and why.
        level: of `logging`.
    """
    log.log(level, text)
