"""Starts several processes that train together, over loopback by default: the one place where tests launch hosts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from tests.children import ROOT, child

PROGRAM = "import sys; from maxdiffusion.cli.main import main; sys.exit(main())"
SECONDS = 800.0
"""Longest that hosts may take: two processes of four devices each starve on a machine that does other things."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one host ended.

    Attributes:
        status: exit status; negative for a signal.
        said: standard error.
        out: standard output.
    """

    status: int
    said: str
    out: str


class Running:
    """Hosts that have been started; `wait` gives how each ended."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> None:
        self.processes = list(processes)
        self.logs = list(logs)

    def said(self, host: int) -> str:
        """What a host has said so far."""
        return self.logs[host].read_text(encoding="utf-8", errors="replace")

    def wait_until(self, host: int, text: str, seconds: float = SECONDS) -> None:
        """Returns when a host has said a text."""
        deadline = time.monotonic() + seconds
        while text not in self.said(host):
            assert time.monotonic() < deadline, f"host {host} has not said {text!r}, but:\n{self.said(host)}"
            assert self.processes[host].poll() is None, f"host {host} has ended:\n{self.said(host)}"
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        """SIGKILL: no farewell."""
        self.processes[host].send_signal(signal.SIGKILL)

    def wait(self, seconds: float = SECONDS) -> list[Ended]:
        """Waits for all hosts."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        hanging = [host for host, process in enumerate(self.processes) if process.poll() is None]
        logs = "\n".join(f"--- host {host}\n{self.said(host)}" for host in range(len(self.logs)))
        assert not hanging, f"hosts {hanging} have not ended after {seconds} s:\n{logs}"
        return [
            Ended(
                status=process.returncode,
                said=self.said(host),
                out=self.logs[host].with_suffix(".out").read_text(encoding="utf-8"),
            )
            for host, process in enumerate(self.processes)
        ]


@contextlib.contextmanager
def hosts(
    folder: Path,
    *words: str,
    num_hosts: int = 2,
    devices: int = 4,
    each: Mapping[int, Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
    program: str = PROGRAM,
    address: str = "127.0.0.1",
    inside: Sequence[Sequence[str]] = (),
) -> Iterator[Running]:
    """Starts `maxdiffusion WORDS` on every host; those that still run at the end are killed.

    Args:
        folder: for what they say.
        words: of the command line.
        num_hosts: number of processes.
        devices: virtual CPU devices of each.
        each: more words for some hosts.
        environ: more variables for all.
        program: Python text that runs the command line; its last word is the host's number.
        address: of host 0.
        inside: for each host a command that becomes the program, such as that of a network of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    coordinator = f"{address}:{free_port()}"
    variables = {**os.environ, **_variables(), **(environ or {})}
    processes, logs = [], []
    for host in range(num_hosts):
        own = ["--coordinator", coordinator, "--num-hosts", str(num_hosts), "--host-id", str(host)]
        line = [*words, *(each or {}).get(host, ()), "--virtual-devices", str(devices), *own]
        log = folder / f"host-{host}.err"
        with log.open("w") as err, log.with_suffix(".out").open("w") as out:
            process = child(
                program, *line, env=variables, stdout=out, stderr=err, inside=inside[host] if inside else ()
            )
        processes.append(process)
        logs.append(log)
    running = Running(processes, logs)
    try:
        yield running
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _variables() -> dict[str, str]:
    """The flags of this process without its devices, and its compilation cache."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    return {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),  # type: ignore[attr-defined]
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
