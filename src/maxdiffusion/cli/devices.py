"""Virtual devices on a CPU, and the cure for a mesh that asks for more devices than there are."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator

from maxdiffusion.errors import MeshError, UsageError
from maxdiffusion.specs import MeshSpec

_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""Virtual devices share the cores: on a busy machine the last one reaches a collective late, which is no deadlock."""

THREADS_PER_DEVICE = 4
"""Threads that XLA's CPU runtime gets for each virtual device.

A collective blocks a thread until all devices have come, and a device runs collectives that do not depend on each other
at once: with one thread a device, which a small machine gets from XLA, some devices can hold all threads while they
wait for the others, for ever."""


def make_virtual_devices(count: int | None) -> None:
    """Splits the CPU into `count` devices; to be called before jax starts.

    Args:
        count: number of devices; None leaves what there is.

    Raises:
        UsageError: the platform is not the CPU, or another number of devices is already asked for.
    """
    if count is None:
        return
    platforms = os.environ.get("JAX_PLATFORMS", "")
    flags = os.environ.get("XLA_FLAGS", "")
    if platforms and not platforms.startswith("cpu"):
        raise UsageError(_not_cpu(count, platforms.partition(",")[0]))
    forced = _FORCED.findall(flags)
    if forced and int(forced[-1]) != count:
        raise UsageError(
            f"{count} virtual devices, but XLA_FLAGS asks for {forced[-1]}: "
            "take --xla_force_host_platform_device_count out of XLA_FLAGS, or write the same number"
        )
    missing = [flag for flag in PATIENCE if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, [flags, *missing]))
    # XLA takes the size of its pool of threads from here, and the number of cores where nothing is said.
    os.environ.setdefault("NPROC", str(max(THREADS_PER_DEVICE * count, os.cpu_count() or 1)))
    import jax

    if not forced:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:
            raise UsageError(f"{count} virtual devices: jax has started already, make them before it does") from error
    if platforms != "cpu" and jax.default_backend() != "cpu":
        raise UsageError(_not_cpu(count, jax.default_backend()))


@contextlib.contextmanager
def mesh_cure(mesh: MeshSpec) -> Iterator[None]:
    """Adds to an error about too few devices that a CPU can be split into more."""
    try:
        yield
    except MeshError as error:
        import jax

        wanted = math.prod(mesh.shape().values())
        if jax.default_backend() != "cpu" or wanted <= jax.device_count():
            raise
        raise MeshError(f"{error}; or split this CPU: --virtual-devices {wanted}") from error


def _not_cpu(count: int, platform: str) -> str:
    return (
        f"{count} virtual devices are for the CPU, but jax runs on {platform}: "
        "set JAX_PLATFORMS=cpu, or use the real devices (virtual_devices=null, mesh=null)"
    )
