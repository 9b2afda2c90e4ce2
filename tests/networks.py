"""Two network namespaces joined by a pair of virtual cables: two machines, as far as addresses go. Needs no root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import child

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PLUG = "cable"
"""Name of the interface in each namespace, beside `lo`."""

_SLEEP = "import time; time.sleep(3600)"
_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Networks:
    """The two namespaces.

    Attributes:
        inside: for each, the command that runs another one in it.
    """

    inside: tuple[Sequence[str], Sequence[str]]

    def unplug(self) -> None:
        """Nothing comes through any more, and nobody is told: no connection is closed."""
        _run([*self.inside[1], "ip", "link", "set", PLUG, "down"])


@contextlib.contextmanager
def two_networks() -> Iterator[Networks]:
    """Makes them; they go with this process. The test is skipped, with the reason, where that is not allowed."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the program {tool} for network namespaces")
    first = child(_SLEEP, inside=("unshare", "--map-root-user", "--net"))
    holders = [first]
    try:
        _wait_for_namespace(first, os.getpid())
        user = ["nsenter", "--target", str(first.pid), "--user", "--preserve-credentials"]
        second = child(_SLEEP, inside=(*user, "unshare", "--net"))
        holders.append(second)
        _wait_for_namespace(second, os.getpid())
        inside = tuple([*user, f"--net=/proc/{holder.pid}/ns/net"] for holder in holders)
        pair = ["ip", "link", "add", PLUG, "type", "veth", "peer", "name", PLUG, "netns", str(second.pid)]
        _run([*inside[0], *pair])
        for own, address in zip(inside, ADDRESSES, strict=True):
            _run([*own, "ip", "address", "add", f"{address}/24", "dev", PLUG])
            for name in ("lo", PLUG):
                _run([*own, "ip", "link", "set", name, "up"])
        yield Networks(inside=(inside[0], inside[1]))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wait_for_namespace(process: subprocess.Popen[str], other: int) -> None:
    """Returns when a process has another network namespace than `other`; skips where it is refused one."""
    deadline, theirs = time.monotonic() + _SECONDS, _namespace(other)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.skip("network namespaces are not allowed here: `unshare --map-root-user --net` is refused")
        with contextlib.suppress(OSError):
            if _namespace(process.pid) != theirs:
                return
        time.sleep(0.02)
    pytest.skip(f"no network namespace came within {_SECONDS:.0f} s")


def _namespace(pid: int) -> str:
    return os.readlink(Path("/proc") / str(pid) / "ns" / "net")


def _run(line: Sequence[str]) -> None:
    """Runs a command; skips with what it says where it is refused."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"`{' '.join(line[-10:])}` is refused here: {done.stderr.strip()}")
