"""Launchers are found by what they leave in the environment, flags pin, and contradictions are one line each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import UsageError
from maxdiffusion.parallel import board, multihost
from maxdiffusion.parallel.multihost import (
    abort_after,
    check_collectives,
    connections,
    everywhere,
    find_hosts,
    share_of,
)
from maxdiffusion.train import watchdog

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:1",
}
ALL = {"coordinator": "a:1", "num_hosts": 2, "host_id": 1}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (SLURM, ("Slurm", None, 2, 1, "slurm")),
        (OPEN_MPI, ("Open MPI", None, 4, 3, "ompi")),
        (SLURM | OPEN_MPI, ("Open MPI", None, 4, 3, "ompi")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, ("the TPU pod", None, 4, None, "gketpu")),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (
            {"JAX_COORDINATOR_IP": "10.0.0.1", "JAX_COORDINATOR_PORT": "99", "NNODES": "2", "NODE_RANK": "1"},
            ("the environment", "10.0.0.1:99", 2, 1, "deactivate"),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "b:2", "PMI_SIZE": "2", "PMI_RANK": "0"},
            ("MPI (PMI)", "b:2", 2, 0, "deactivate"),
        ),
    ],
)
def test_a_launcher_is_found_by_its_variables(environ: dict[str, str], found: tuple[Any, ...] | None) -> None:
    hosts = find_hosts(environ)
    seen = None if hosts is None else (
        hosts.launcher, hosts.coordinator, hosts.num_hosts, hosts.host_id, hosts.method
    )  # fmt: skip
    assert seen == found


def test_kubernetes_asks_its_package_or_for_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    monkeypatch.setattr(multihost.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"Kubernetes started .* does not say --coordinator and --num-hosts: write them"
    ):
        find_hosts(environ)
    hosts = find_hosts(environ, coordinator="job-0.pods:1", num_hosts=2)
    assert hosts is not None and (hosts.host_id, hosts.method) == (1, "deactivate")
    monkeypatch.setattr(multihost.importlib.util, "find_spec", lambda name: object())
    hosts = find_hosts(environ)
    assert hosts is not None and hosts.method == "k8s"


def test_all_flags_pin_everything() -> None:
    hosts = find_hosts(SLURM, coordinator="a:1", num_hosts=8, host_id=3)
    assert hosts is not None
    assert (hosts.launcher, hosts.num_hosts, hosts.host_id, hosts.method) == ("the command line", 8, 3, "deactivate")
    assert find_hosts(SLURM, num_hosts=1) is None


def test_a_flag_fills_in_what_a_launcher_does_not_say() -> None:
    hosts = find_hosts({"PMI_SIZE": "2", "PMI_RANK": "1"}, coordinator="[::1]:80")
    assert hosts is not None
    assert (hosts.coordinator, hosts.num_hosts, hosts.host_id) == ("[::1]:80", 2, 1)


def test_a_tpu_machine_asks_its_pod() -> None:
    hosts = find_hosts({}, tpu=True)
    assert hosts is not None and hosts.method == "gcetpu"
    assert find_hosts({"TPU_SKIP_MDS_QUERY": "1"}, tpu=True) is None


@pytest.mark.parametrize(
    ("environ", "flags", "told"),
    [
        ({}, {"num_hosts": 2}, "--num-hosts 2 needs --coordinator and --host-id too: no launcher was found"),
        ({}, {"host_id": 0}, "--host-id 0 needs --coordinator and --num-hosts too"),
        (SLURM, {"num_hosts": 4}, "--num-hosts 4, but Slurm says 2: leave it out, or give all of"),
        (SLURM, {"host_id": 0}, "--host-id 0, but Slurm says 1"),
        ({}, ALL | {"host_id": 2}, "--host-id 2: hosts are counted from 0 to 1"),
        ({}, ALL | {"host_id": -1}, "--host-id -1: hosts are counted from 0 to 1"),
        ({}, ALL | {"num_hosts": 0}, "--num-hosts 0: write the number of processes"),
        ({}, ALL | {"coordinator": "a"}, "--coordinator a: write HOST:PORT"),
        ({}, ALL | {"coordinator": "http://a:1"}, "--coordinator http://a:1: write HOST:PORT"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            {},
            r"MPI \(PMI\) started this host, but does not say --coordinator: write",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "JAX_COORDINATOR_ADDRESS is set, but not both NNODES and NODE_RANK"),
        (SLURM | {"SLURM_NTASKS": "two"}, {}, "SLURM_NTASKS='two' is no number"),
    ],
)
def test_what_is_missing_or_contradicts_is_one_line(environ: dict[str, str], flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        find_hosts(environ, **flags)
    assert "\n" not in str(error.value)


def test_an_allocation_without_srun_is_told(caplog: pytest.LogCaptureFixture) -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_hosts(environ) is None
    assert "Slurm has 2 tasks here, but this process was not started by srun" in caplog.text


def test_mpi_with_several_devices_is_refused() -> None:
    mpi = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}
    with pytest.raises(UsageError, match="MPI collectives with 4 CPU devices a process crash"):
        check_collectives(mpi, 4)
    check_collectives(mpi, 1)
    check_collectives({}, 4)


class _Part:
    """A sharding of which this host has some devices, each with some rows."""

    def __init__(self, *rows: slice) -> None:
        self.rows = rows

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
        return {device: (rows,) for device, rows in enumerate(self.rows)}


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        ((slice(None),), (0, 1)),
        ((slice(0, 2), slice(2, 4)), (0, 2)),
        ((slice(4, 6), slice(6, 8)), (1, 2)),
        ((slice(6, 8), slice(6, 8)), (3, 4)),
        ((slice(0, 2), slice(4, 6)), (0, 1)),
        ((slice(2, 4), slice(4, 6)), (0, 1)),
    ],
)
def test_hosts_read_the_rows_that_their_devices_hold(rows: tuple[slice, ...], share: tuple[int, int]) -> None:
    # A host whose rows are no n-th of the batch, or lie apart, must read all of it.
    assert share_of(_Part(*rows), (8,)) == share  # type: ignore[arg-type]


def test_connections_reach_every_group_of_devices(devices: np.ndarray) -> None:
    mesh = Mesh(devices.reshape(2, 2, 2), ("data", "one", "tensor"))
    # Each device hears 1 from itself, 2 along each of three axes, 4 along each of three pairs, and 8 from all.
    assert int(connections(mesh)()) == 1 + 3 * 2 + 3 * 4 + 8  # type: ignore[call-overload]


def test_a_value_that_every_host_has_lies_on_all_devices(devices: np.ndarray) -> None:
    sharding = NamedSharding(Mesh(devices, ("all",)), P())
    key = everywhere(jax.random.key(3), sharding)
    assert key.sharding.is_equivalent_to(sharding, 0)
    assert jax.random.bits(key) == jax.random.bits(jax.random.key(3))
    assert everywhere(key, None) is key


@pytest.mark.parametrize("host_timeout", [5, 20, 100])
def test_jax_aborts_only_after_the_watchdog_has_said_its_line(host_timeout: int) -> None:
    """A host that dies right before it would have sent a heartbeat is missed half of jax's limit later."""
    noticed = host_timeout + 2 * watchdog.INTERVAL
    assert abort_after(host_timeout) / 2 > noticed + watchdog.GRACE + board.LEAVING
