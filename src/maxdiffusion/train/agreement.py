"""Before the first step, all hosts say what they run and where; the odd one is named, with the value that differs."""

from __future__ import annotations

import functools
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


SHARED = 60.0
"""Seconds that a host looks for what host 0 has written: network file systems remember that a file was not there."""

TOKEN = ".hosts"
"""File that host 0 writes into the run's folder for the others to find, and deletes again."""


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
    _compare(board, topic, dict(facts), lambda said: difference(topic, said), seconds=seconds)


def share_folder(board: Board, folder: Path, *, seconds: float = PATIENCE, patience: float = SHARED) -> None:
    """Sees that the run's folder is one for all hosts: host 0 writes a file into it, and every host looks for it.

    Args:
        board: of all hosts.
        folder: of the run; host 0 makes it.
        seconds: to wait for the last host.
        patience: seconds that a host looks.

    Raises:
        DisagreementError: a host does not find the file; raised on every host, with the name of the first such.
        UsageError: host 0 cannot write there, or a host did not come to the check.
    """
    token, file = uuid.uuid4().hex, folder / TOKEN
    if board.host == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(token, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {error.strerror or error}; choose another folder") from error
        board.write("folder", token)
    wanted = board.wait_for("folder", seconds)
    if wanted is None:
        raise UsageError(f"host 0 has written nothing into the run's folder for {seconds:.0f} s: look at what it says")
    seen = _holds(file, wanted, patience)
    try:
        _compare(board, "folder", {"folder": str(folder), "seen": seen}, _unshared, seconds=seconds)
    finally:
        if board.host == 0:
            file.unlink(missing_ok=True)


def _holds(file: Path, text: str, patience: float) -> bool:
    """Whether a file holds a text, before the patience is over."""
    deadline = time.monotonic() + patience
    while True:
        try:
            if file.read_text(encoding="utf-8") == text:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(min(1.0, patience))


def _unshared(said: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The line about the hosts that do not see the folder of host 0."""
    blind = [host for host, facts in said.items() if not facts["seen"]]
    if not blind:
        return None
    host, more = blind[0], f" (nor do {len(blind) - 1} more hosts)" if len(blind) > 1 else ""
    return (
        f"the run's folder is not shared: host 0 wrote a file into {said[0]['folder']}, and host {host} does not "
        f"find it in {said[host]['folder']}{more}: give all hosts one folder of a shared file system, or a bucket"
    )


def _compare(
    board: Board,
    topic: str,
    facts: Mapping[str, Any],
    judge: Callable[[Mapping[int, Any]], str | None],
    *,
    seconds: float,
) -> None:
    """Host 0 reads what all have to say on a topic and pins its verdict: a line if something is wrong.

    Raises:
        DisagreementError: something is; raised on every host.
        UsageError: a host did not come to the check.
    """
    board.write(f"agree-{topic}/{board.host}", json.dumps(facts))
    if board.host == 0:
        said = {}
        for host in range(board.num_hosts):
            text = board.wait_for(f"agree-{topic}/{host}", seconds)
            if text is None:
                raise UsageError(
                    f"host {host} has not come to the check of {topic} for {seconds:.0f} s: look at what it says"
                )
            said[host] = json.loads(text)
        board.write(f"verdict/{topic}", judge(said) or "")
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
