"""Joining the other hosts before jax starts, and leaving them so that none waits for one that has ended."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def join_others(
    *, coordinator: str | None, num_hosts: int | None, host_id: int | None, host_timeout: int, virtual: int | None
) -> None:
    """Finds out whether there are other hosts, and joins them; a single one goes on alone.

    Args:
        coordinator: `HOST:PORT` of host 0; None asks the launcher, and so for the next two.
        num_hosts: number of hosts.
        host_id: number of this one.
        host_timeout: seconds without a sign of life after which a host counts as gone.
        virtual: CPU devices that this process will make; None for what there is.

    Raises:
        UsageError: a value is missing or contradicts another, or the others do not come.
    """
    from maxdiffusion.parallel import multihost

    found = multihost.find_hosts(
        os.environ, coordinator=coordinator, num_hosts=num_hosts, host_id=host_id, tpu=_has_tpu()
    )
    if found is None:
        return
    if virtual is not None:
        multihost.check_collectives(os.environ, virtual)
    multihost.join(found, host_timeout=host_timeout, interface=os.environ.get(multihost.INTERFACE))


def joined() -> bool:
    """Whether this process has joined others; jax is not imported for the question."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def is_first() -> bool:
    """Whether this is host 0, the one that shows results."""
    import jax

    return jax.process_index() == 0


def leave_together() -> None:
    """Waits for the others and parts from them, where there are any: all have come to the same end."""
    if joined():
        import jax

        jax.distributed.shutdown()


def leave(status: int) -> int:
    """Ends this process's part: all well, it waits for the others; otherwise it ends at once, for they may never come.

    Args:
        status: exit status.

    Returns:
        The status, where this process is alone or all is well.
    """
    if not joined():
        return status
    if status == 0:
        leave_together()
        return status
    from maxdiffusion.parallel.board import BoardGoneError, open_board

    board = open_board()
    if board is not None:
        with contextlib.suppress(BoardGoneError):  # then there is nobody to tell
            if board.read(f"left/{board.host}") is None:
                board.write(f"left/{board.host}", f"exit status {status}")
        board.leave_last()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _has_tpu() -> bool:
    """Whether there are TPU chips here and jax will look for them."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
