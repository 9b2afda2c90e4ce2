"""A process that is killed leaves no children behind, however many, and whatever they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from tests.children import ROOT

PARENT = """
import time
from tests.children import child
# One write each: of two that print, the one's number may come between the other's and the end of its line.
tell = "import os, time; os.write(1, b'%d\\\\n' % os.getpid())\\n"
idle = tell + "time.sleep(600)"
busy = tell + "while True: pass"
children = [child(idle), child(busy)]
time.sleep(600)
"""


def test_children_of_a_killed_process_end() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    try:
        parent.send_signal(signal.SIGKILL)
        # Their output is the parent's: it ends when the last process that holds it does.
        parent.communicate(timeout=30)
    except subprocess.TimeoutExpired as error:
        raise AssertionError("children have outlived their parent") from error
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
