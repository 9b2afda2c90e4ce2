"""Before the first step, all hosts say what they run; the odd one out is named, with the value that differs."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import jax
from jax.sharding import Mesh

import maxdiffusion
from maxdiffusion.config.load import format_value
from maxdiffusion.config.schema import Recipe, flatten
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.errors import UsageError
from maxdiffusion.parallel.board import Board

PATIENCE = 600.0
"""Seconds that hosts may come to a check apart: one may read its pictures from a slower disk."""


class DisagreementError(UsageError):
    """Hosts would train different things; the message names the odd one and what differs."""


def agree(board: Board, topic: str, facts: Mapping[str, str], *, seconds: float = PATIENCE) -> None:
    """Compares the facts of all hosts.

    Host 0 reads what every host has pinned to the board and pins the verdict, so that the board carries each fact twice
    and not once for every pair of hosts.

    Args:
        board: of all hosts.
        topic: name of the check; each is done once.
        facts: names and values that must be the same everywhere; a name that a host lacks differs too.
        seconds: to wait for the last host.

    Raises:
        DisagreementError: they differ; raised on every host.
        UsageError: a host did not come to the check.
    """
    board.write(f"agree-{topic}/{board.host}", json.dumps(dict(facts)))
    if board.host == 0:
        said = {}
        for host in range(board.num_hosts):
            text = board.wait_for(f"agree-{topic}/{host}", seconds)
            if text is None:
                raise UsageError(
                    f"host {host} has not come to the check of {topic} for {seconds:.0f} s: look at what it says"
                )
            said[host] = json.loads(text)
        board.write(f"verdict/{topic}", difference(topic, said) or "")
    verdict = board.wait_for(f"verdict/{topic}", 2 * seconds)
    if verdict is None:
        raise UsageError(f"host 0 has given no verdict on {topic} for {2 * seconds:.0f} s: look at what it says")
    if verdict:
        raise DisagreementError(verdict)


def difference(topic: str, said: Mapping[int, Mapping[str, str]]) -> str | None:
    """The line about what differs, or None. The value that most hosts have is right; at a tie, that of host 0."""
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        values = {host: facts.get(name, "nothing") for host, facts in said.items()}
        counts = Counter(values.values())
        usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
        odd = {host: value for host, value in sorted(values.items()) if value != usual}
        if odd:
            hosts = ", ".join(f"host {host} has {value}" for host, value in list(odd.items())[:4])
            more = f" (and {len(odd) - 4} more hosts)" if len(odd) > 4 else ""
            return (
                f"hosts do not agree on the {topic}: {name} is {usual} on {counts[usual]} of {len(said)} hosts, but "
                f"{hosts}{more}: start all with the same"
            )
    return None


def setup_facts(recipe: Recipe, *, mesh: Mesh, samples: Fingerprint, done: int) -> dict[str, str]:
    """What must agree before anything is computed together.

    Args:
        recipe: every value of it.
        mesh: axes, sizes, and the order of its devices.
        samples: of the training data.
        done: step that this host would go on from.
    """
    values = {key: format_value(value) for key, value in flatten(recipe).items()}
    order = ",".join(str(device.id) for device in mesh.devices.flat)
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    return {
        "maxdiffusion": f"{maxdiffusion.__version__} (sources {source_hash()})",
        "jax": f"{jax.__version__} (jaxlib {version('jaxlib')})",
        **values,
        "mesh": f"{sizes} of devices {_short(order) if mesh.size > 16 else order}",
        "data": f"{samples.number} samples ({_short(samples.names, samples.captions, samples.sizes)})",
        "the step to go on from": str(done),
    }


def weight_facts(checksums: Mapping[str, int]) -> dict[str, str]:
    """What must agree of the weights before the first step, from `replica_checksums`."""
    return {name: f"{value:08x}" for name, value in checksums.items()}


@functools.cache
def source_hash() -> str:
    """A hash of the files of this package, so that two checkouts of one version differ."""
    folder = Path(maxdiffusion.__file__).parent
    parts = [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in sorted(folder.rglob("*.py"))]
    return _short(*(name for name, _ in parts), *(hashlib.sha256(content).hexdigest() for _, content in parts))


def _short(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
