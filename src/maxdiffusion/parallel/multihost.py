"""Several hosts, one training: who they are (flags, or the launcher's environment), joining them, and their shares.

A host here is one process of jax. Values come from the command line first, then from the launcher that started the
process; what is missing, or contradicts, is said in one line before jax waits for anybody.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.parallel import addresses

log = logging.getLogger(__name__)

HOST_TIMEOUT = 100
"""Seconds without a sign of life after which a host counts as gone (jax's own number)."""

ENDING = 30
"""Seconds from the time that a host counts as gone until the others have ended: intervals, grace, and a last look."""

JOINING = 3
"""Hosts may join this many times `HOST_TIMEOUT` apart: pods and nodes start one after the other."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable that names the interface of gloo, as users of PyTorch know it."""

PINNED = "deactivate"
"""jax's name for no cluster detection at all."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How this process joins the others.

    Attributes:
        launcher: where the values come from, for people.
        coordinator: `HOST:PORT` of host 0; None lets jax's cluster detection say it.
        num_hosts: number of hosts; None lets jax's cluster detection say it.
        host_id: number of this one; None lets jax's cluster detection say it.
        method: jax's cluster detection method; `deactivate` where nothing is left to detect.
    """

    launcher: str
    coordinator: str | None
    num_hosts: int | None
    host_id: int | None
    method: str


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a launcher's environment says; None where it does not."""

    launcher: str
    coordinator: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None
    method: str | None = None
    cure: str = ""


def find_hosts(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host_id: int | None = None,
    tpu: bool = False,
) -> Hosts | None:
    """How this process joins the others; None where it is alone.

    Args:
        environ: variables of this process, in which launchers say what they started.
        coordinator: `HOST:PORT` on host 0, from the command line; all three pin everything.
        num_hosts: number of hosts, from the command line; 1 is alone, whatever a launcher says.
        host_id: number of this host, from the command line.
        tpu: whether this machine has TPU chips that jax will use: then its pod is asked.

    Raises:
        UsageError: a value is missing, out of range, or contradicts the launcher.
    """
    _check(coordinator, num_hosts, host_id)
    if num_hosts == 1:
        return None
    if coordinator is not None and num_hosts is not None and host_id is not None:
        return Hosts(
            launcher="the command line", coordinator=coordinator, num_hosts=num_hosts, host_id=host_id, method=PINNED
        )
    found = next(filter(None, (launcher(environ) for launcher in _LAUNCHERS)), None)
    if found is None and tpu and not environ.get("TPU_SKIP_MDS_QUERY"):
        found = _Found(launcher="the TPU pod's metadata", method="gcetpu")
    given = {"--coordinator": coordinator, "--num-hosts": num_hosts, "--host-id": host_id}
    if found is None:
        return _alone(given, environ)
    said = {"--coordinator": found.coordinator, "--num-hosts": found.num_hosts, "--host-id": found.host_id}
    for flag, value in given.items():
        if value is not None and said[flag] is not None and value != said[flag]:
            raise UsageError(
                f"{flag} {value}, but {found.launcher} says {said[flag]}: leave it out, or give all of "
                f"{', '.join(given)} so that {found.launcher} is not asked"
            )
    if found.num_hosts == 1 and not any(value is not None for value in given.values()):
        return None
    merged = {flag: said[flag] if value is None else value for flag, value in given.items()}
    missing = [flag for flag, value in merged.items() if value is None]
    if missing and found.method is None:
        raise UsageError(f"{found.launcher} started this host, but does not say {_and(missing)}: {found.cure}")
    _check(merged["--coordinator"], merged["--num-hosts"], merged["--host-id"])  # type: ignore[arg-type]
    return Hosts(
        launcher=found.launcher,
        coordinator=merged["--coordinator"],  # type: ignore[arg-type]
        num_hosts=merged["--num-hosts"],  # type: ignore[arg-type]
        host_id=merged["--host-id"],  # type: ignore[arg-type]
        method=found.method or PINNED,
    )


def join(hosts: Hosts, *, host_timeout: int = HOST_TIMEOUT, interface: str | None = None) -> None:
    """Joins the other hosts; to be called before jax starts its devices. Says once who this is, and what pins it.

    Args:
        hosts: from `find_hosts`.
        host_timeout: seconds without a sign of life after which a host counts as gone.
        interface: network interface of gloo, which joins CPUs; None takes that of the way to the other hosts.

    Raises:
        UsageError: jax has started already, the hosts do not come together in three times `host_timeout`, or there is
            no such interface.
    """
    pinned = hosts.method == PINNED
    if pinned:
        log.info(
            "hosts: host %s of %s is waiting for the others at %s", hosts.host_id, hosts.num_hosts, hosts.coordinator
        )
    try:
        jax.distributed.initialize(
            coordinator_address=hosts.coordinator,
            num_processes=hosts.num_hosts,
            process_id=hosts.host_id,
            cluster_detection_method=hosts.method,
            initialization_timeout=JOINING * host_timeout,
            heartbeat_timeout_seconds=abort_after(host_timeout),
            shutdown_timeout_seconds=host_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(_why_not_joined(hosts, error, JOINING * host_timeout)) from error
    state = _state()
    log.info(
        "hosts: %d, found by %s; this is host %d (pinned by --coordinator %s --num-hosts %d --host-id %d)",
        state.num_processes,
        hosts.launcher,
        state.process_id,
        state.coordinator_address,
        state.num_processes,
        state.process_id,
    )
    _place_gloo(state, interface, seconds=JOINING * host_timeout)


def _place_gloo(state: Any, interface: str | None, *, seconds: float) -> None:
    """Says to gloo where this host is reached; left alone it may tell the others an address of loopback."""
    if interface:
        names = [name for _, name in socket.if_nameindex()]
        if interface not in names:
            raise UsageError(f"{INTERFACE}={interface}: this host has no such interface: {nearest(interface, names)}")
        place = {"interface": interface}
    else:
        number, address = state.num_processes, state.coordinator_address
        try:
            own = addresses.reached_at(state.client, state.process_id, number, address, seconds=seconds)
        except OSError as error:
            log.warning("hosts: no way to %s (%s): gloo looks for its address itself", address, error)
            return
        place = {"hostname": own}
    addresses.make_gloo_use(place)


def abort_after(host_timeout: int) -> int:
    """Seconds for jax's own time limit, after which it aborts with a stack: later than the watchdog has said its line.

    jax's hosts send their heartbeats every half of the limit. So one that dies is missed after anything between half of
    it and all of it, and half of it must be enough for the watchdog to see it, say so, and let the others read it.
    """
    return 2 * (host_timeout + ENDING)


def check_collectives(environ: Mapping[str, str], devices_per_host: int) -> None:
    """Refuses collectives of the CPU that cannot work.

    Args:
        environ: variables of this process; jax reads `JAX_CPU_COLLECTIVES_IMPLEMENTATION`.
        devices_per_host: CPU devices of each process.

    Raises:
        UsageError: MPI with more than one device a process, which ends in a segmentation fault.
    """
    if environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "").lower() == "mpi" and devices_per_host > 1:
        raise UsageError(
            f"MPI collectives with {devices_per_host} CPU devices a process crash in jax: take gloo "
            "(JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo), or one device a process (--virtual-devices 1)"
        )


def share_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, int]:
    """Which part of an array's rows this host must have: `(index, number)` of equal runs of rows.

    Hosts that share no rows take different runs; hosts on which the batch is repeated take the same one. Where the
    rows of a host are no such run, every host takes all: `(0, 1)`.

    Args:
        sharding: of the array.
        shape: of the whole array; the first dimension is the rows.
    """
    total = shape[0]
    rows = [index[0].indices(total)[:2] for index in sharding.addressable_devices_indices_map(shape).values()]  # type: ignore[union-attr]
    first, last = min(low for low, _ in rows), max(high for _, high in rows)
    held = {row for low, high in set(rows) for row in range(low, high)}
    run = last - first
    if len(held) != run or first % run or total % run:
        return 0, 1
    return first // run, total // run


def everywhere(x: Any, sharding: Sharding | None) -> Any:
    """A value that every host has, as one array or key on all devices; nothing is exchanged or compared.

    Args:
        x: array, or key of `jax.random.key`.
        sharding: a replicated one; None leaves the value as it is.
    """
    if sharding is None:
        return x
    if sharding.is_fully_addressable or isinstance(x, Tracer):
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(everywhere(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def connections(mesh: Mesh) -> Callable[[], object]:
    """A compiled program in which every group of devices along mesh axes talks once; to be called by all hosts at once.

    gloo, which joins CPUs, connects a group at its first collective, and gives the others half a minute to come to it:
    hosts that compile for different times would miss it in the middle of a run.

    Args:
        mesh: of all hosts.
    """
    axes = [name for name, size in mesh.shape.items() if size > 1]
    groups = [group for number in range(1, len(axes) + 1) for group in itertools.combinations(axes, number)]

    def talk(x: jax.Array) -> jax.Array:
        return sum((jax.lax.psum(x, group) for group in groups), x)

    mapped = jax.shard_map(talk, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    one = everywhere(np.ones((), np.float32), NamedSharding(mesh, P()))
    program = jax.jit(mapped).lower(one).compile()
    return lambda: program(one).block_until_ready()


# --- What launchers say -----------------------------------------------------------------------------------------------


def _environment(environ: Mapping[str, str]) -> _Found | None:
    """Variables that people set themselves: those of jax, and `NNODES` and `NODE_RANK` beside an address."""
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None and "JAX_COORDINATOR_IP" in environ:
        address = f"{environ['JAX_COORDINATOR_IP']}:{environ.get('JAX_COORDINATOR_PORT', '1234')}"
    number, own = _first(environ, "JAX_NUM_PROCESSES", "NNODES"), _first(environ, "JAX_PROCESS_ID", "NODE_RANK")
    if address is None or number is None or own is None:
        return None  # an address alone may belong to a launcher below
    return _Found(launcher="the environment", coordinator=address, num_hosts=number, host_id=own)


def _open_mpi(environ: Mapping[str, str]) -> _Found | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return _Found(
        launcher="Open MPI",
        coordinator=environ.get("JAX_COORDINATOR_ADDRESS"),
        num_hosts=_number(environ, "OMPI_COMM_WORLD_SIZE"),
        host_id=_number(environ, "OMPI_COMM_WORLD_RANK"),
        # Open MPI 5 no longer names the launcher's address, which jax's detection reads.
        method="ompi" if "OMPI_MCA_orte_hnp_uri" in environ else None,
        cure="write --coordinator HOST:PORT, a free port of the machine that runs rank 0",
    )


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    needed = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in needed):  # inside an allocation, but not started by srun
        if _first(environ, "SLURM_NTASKS") not in (None, 1):
            log.warning(
                "hosts: Slurm has %s tasks here, but this process was not started by srun, so it trains alone: "
                "put `srun` before the command",
                environ["SLURM_NTASKS"],
            )
        return None
    return _Found(
        launcher="Slurm",
        coordinator=environ.get("JAX_COORDINATOR_ADDRESS"),
        num_hosts=_number(environ, "SLURM_NTASKS"),
        host_id=_number(environ, "SLURM_PROCID"),
        method="slurm",
    )


def _other_mpi(environ: Mapping[str, str]) -> _Found | None:
    """MPICH, Intel MPI and others that start processes through PMI."""
    if "PMI_SIZE" not in environ or "PMI_RANK" not in environ:
        return None
    return _Found(
        launcher="MPI (PMI)",
        coordinator=environ.get("JAX_COORDINATOR_ADDRESS"),
        num_hosts=_number(environ, "PMI_SIZE"),
        host_id=_number(environ, "PMI_RANK"),
        cure="write --coordinator HOST:PORT, a free port of the machine that runs rank 0",
    )


def _tpu_pod(environ: Mapping[str, str]) -> _Found | None:
    """TPU slices on Kubernetes: the variables hold the workers of this slice, and the number of slices."""
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    workers = len([name for name in names.split(",") if name.strip()])
    slices = _first(environ, "MEGASCALE_NUM_SLICES") or 1
    if not workers or environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    number = workers * slices
    return _Found(launcher="the TPU pod", num_hosts=number, method="gketpu")


def _kubernetes(environ: Mapping[str, str]) -> _Found | None:
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    knows = importlib.util.find_spec("kubernetes") is not None
    return _Found(
        launcher="Kubernetes",
        coordinator=environ.get("JAX_COORDINATOR_ADDRESS"),
        host_id=_number(environ, "JOB_COMPLETION_INDEX"),
        method="k8s" if knows else None,
        cure="write them (--coordinator JOB-0.SERVICE:PORT), or install the package kubernetes, which asks it; "
        "a single pod writes --num-hosts 1",
    )


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], _Found | None], ...] = (
    _environment,
    _open_mpi,
    _slurm,
    _other_mpi,
    _tpu_pod,
    _kubernetes,
)
"""In the order asked: what started the process last comes first (mpirun inside a Slurm allocation)."""


def _alone(given: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """No launcher: nothing given is one host, a part of what is needed is an error."""
    address = next((name for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP") if name in environ), None)
    if address is not None and all(value is None for value in given.values()):
        raise UsageError(
            f"{address} is set, but not both NNODES and NODE_RANK: set them, or write --num-hosts and --host-id "
            "(--num-hosts 1 trains alone)"
        )
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) < len(given):
        have = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise UsageError(
            f"{have} needs {_and(missing)} too: no launcher was found that says it (Slurm, Open MPI, Kubernetes, a TPU "
            "pod)"
        )


def _check(coordinator: str | None, num_hosts: int | None, host_id: int | None) -> None:
    if coordinator is not None and not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:\s/]+):[0-9]{1,5}", coordinator):
        raise UsageError(
            f"--coordinator {coordinator}: write HOST:PORT, a name of host 0 that all hosts know and a free port there"
        )
    if num_hosts is not None and num_hosts < 1:
        raise UsageError(f"--num-hosts {num_hosts}: write the number of processes, 1 or more")
    if host_id is not None and (host_id < 0 or (num_hosts is not None and host_id >= num_hosts)):
        last = "the number of hosts less 1" if num_hosts is None else num_hosts - 1
        raise UsageError(f"--host-id {host_id}: hosts are counted from 0 to {last}")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(f"{name}={environ[name]!r} is no number: the launcher's variables are broken") from None


def _first(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is there, as a number; Slurm's `2(x3)` counts as none."""
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else _number(environ, name)


def _and(flags: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(flags[:-1]), flags[-1]]))


def _why_not_joined(hosts: Hosts, error: Exception, seconds: int) -> str:
    text = str(error)
    late = sorted({int(number) for number in re.findall(r"task:(\d+)", text)})
    if "must be called before" in text or "only be called once" in text:
        return f"jax has started its devices already: join the other hosts before ({text.splitlines()[0]})"
    if "DEADLINE_EXCEEDED" in text or "timed out" in text.lower():
        who = f"host {', '.join(map(str, late))}" if late else "not every host"
        return (
            f"{who} did not join within {seconds} s: start all {hosts.num_hosts or ''} hosts, each with its own "
            f"number, and let all reach {hosts.coordinator or 'host 0'} (a longer wait: --host-timeout)"
        )
    return f"hosts cannot join ({hosts.launcher}): {text.splitlines()[0] if text else type(error).__name__}"


def _state():
    from jax._src import distributed  # the only place that knows the client; jax has no public face for it

    return distributed.global_state
