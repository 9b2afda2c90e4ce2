"""Which memory of the host an activation can wait in, where a platform has one."""

from __future__ import annotations

import logging

from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout

log = logging.getLogger(__name__)

PINNED_HOST = "pinned_host"
"""Memory kind of jax: pages of the host that an accelerator reads and writes by itself."""


def host_memory(layout: Layout) -> str | None:
    """The memory kind to offload to, or None where the devices have no memory but the host's own.

    Goes by the platform, so that the answer is the same for devices that are here and for those of a topology that a
    program is compiled for. None is said once in the log: what would be offloaded then stays where it is.

    Args:
        layout: mesh and rules.
    """
    if layout.platform in ("gpu", "tpu"):
        return PINNED_HOST
    say_once(
        log,
        f"remat_policy='offload': platform '{layout.platform}' computes in the memory of the host, so nothing is "
        "moved: block inputs and named activations stay where they are, as with 'full'",
    )
    return None
