"""Virtual devices on a CPU, and the cure for a mesh that asks for more devices than there are."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
from collections.abc import Iterator

from maxdiffusion.errors import MeshError, UsageError
from maxdiffusion.specs import THREADS_PER_DEVICE, MeshSpec

_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""Virtual devices share the cores: on a busy machine the last one reaches a collective late, which is no deadlock."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's `mallopt`, from its malloc.h."""


def make_virtual_devices(count: int | None) -> None:
    """Splits the CPU into `count` devices; to be called before jax starts.

    Args:
        count: number of devices; None leaves what there is.

    Raises:
        UsageError: the platform is not the CPU, or another number of devices is already asked for.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms == "cpu" or count is not None:
        keep_freed_memory()
    if count is None:
        return
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


def keep_freed_memory() -> None:
    """Lets the C library keep large blocks that are freed, for XLA's CPU runtime takes its buffers anew at every call.

    Without it, each step gives its memory back and has it cleared page by page again by the system. Settings of the
    user's (`MALLOC_...` or `GLIBC_TUNABLES`) are left alone, and so is a C library other than glibc.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    for parameter, size in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
        libc.mallopt(parameter, size)


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
