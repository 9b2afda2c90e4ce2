"""Starts child processes that end with the process that started them, however that ended: none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent

_WATCH = "import tests.children; tests.children.end_with_parent()\n"


def child(
    program: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    inside: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Runs a program in a child process; standard input is the pipe by which it knows that its parent lives.

    Args:
        program: Python text.
        words: the rest of `sys.argv`.
        env: its variables; None for those of this process.
        stdout: where its output goes; None for that of this process.
        stderr: the same for its errors.
        inside: a command that becomes the program that its words name, such as `unshare -n`.
    """
    line = [*inside, sys.executable, "-u", "-c", _WATCH + program, *words]
    return subprocess.Popen(line, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True)


def end_with_parent() -> None:
    """Ends this process where its standard input does, as when the process that holds the other end is killed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the parent").start()
