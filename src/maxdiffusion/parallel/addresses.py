"""The address under which gloo, which joins CPUs, is reached on this host: that of its way to the other hosts.

Left alone, gloo looks up this machine's own name, for which many an `/etc/hosts` says 127.0.0.1 or 127.0.1.1: then
every other host would look for this one on itself.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

import jax


def address_towards(host: str) -> str:
    """The numeric address of this machine that a connection to `host` would come from; nothing is sent.

    Raises:
        OSError: there is no way there.
    """
    kind, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def reached_at(client: Any, host: int, num_hosts: int, coordinator: str, *, seconds: float) -> str:
    """The address that the other hosts reach this one at; to be called by all of them.

    It is that of the way to host 0. Host 0 itself may know its own name as an address of loopback; then it is that of
    the way to a host that does not.

    Args:
        client: of the coordination service.
        host: number of this host.
        num_hosts: number of all.
        coordinator: `HOST:PORT` of host 0.
        seconds: that it waits for the others.
    """
    own = address_towards(coordinator.rpartition(":")[0].strip("[]"))
    client.key_value_set(f"maxdiffusion/address/{host}", own)
    if not _is_loopback(own):
        return own
    for other in range(num_hosts):
        theirs = client.blocking_key_value_get(f"maxdiffusion/address/{other}", int(seconds * 1000))
        if not _is_loopback(theirs):
            return address_towards(theirs)
    return own


def make_gloo_use(place: Mapping[str, str]) -> None:
    """Lets jax make its CPU devices with gloo at this place; to be called before it makes any.

    Args:
        place: `hostname`, or the name of an `interface`.
    """
    from jax._src import distributed, xla_bridge  # jax takes collectives here, and has no public face for them
    from jaxlib import _jax  # type: ignore[attr-defined]

    def make() -> Any:
        if jax.config.jax_cpu_collectives_implementation != "gloo":  # type: ignore[attr-defined]
            return xla_bridge.make_cpu_client()
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, **place)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
