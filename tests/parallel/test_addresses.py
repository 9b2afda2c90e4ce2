from __future__ import annotations

import socket
import threading

import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.parallel import addresses, multihost
from tests.boards import Service

ROUTES = {
    "node0": {0: "127.0.1.1", 1: "10.0.0.6"},
    "10.0.0.6": {0: "10.0.0.5"},
    "localhost": {0: "::1", 1: "127.0.0.1"},
}
"""Where a connection to a name comes from, for each host: on Debian, host 0 knows its own name as 127.0.1.1."""


def test_a_way_is_asked_for_without_a_connection() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("coordinator", "reached"),
    [("node0:1234", ["10.0.0.5", "10.0.0.6"]), ("localhost:1234", ["::1", "127.0.0.1"])],
    ids=["a name of loopback on host 0", "one machine"],
)
def test_each_host_is_reached_at_the_address_of_its_way(
    coordinator: str, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, found = Service(), {}

    def towards(name: str) -> str:
        return ROUTES[name][int(threading.current_thread().name)]

    monkeypatch.setattr(addresses, "address_towards", towards)

    def ask() -> None:
        host = int(threading.current_thread().name)
        found[host] = addresses.reached_at(service, host, 2, coordinator, seconds=10)

    threads = [threading.Thread(target=ask, name=str(host)) for host in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[host] for host in range(2)] == reached


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(
        UsageError, match="GLOO_SOCKET_IFNAME=eth1: this host has no such interface: did you mean 'eth0'"
    ):
        multihost._place_gloo(None, "eth1", seconds=1)
