"""A notice board that all hosts see: small texts by name, kept by jax's coordination service on host 0.

It needs no collective and no shared file system, so that it still works where one host hangs in a collective.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import Any

import jax

ROOT = "maxdiffusion"

LEAVING = 10.0
"""Seconds that host 0 stays for the others to read why it leaves: with its process the board is gone."""


class BoardGoneError(Exception):
    """Host 0, which keeps the board, does not answer."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """The board; make one with `open_board`.

    Attributes:
        client: jax's client of the coordination service.
        host: number of this host.
        num_hosts: number of all.
        address: `HOST:PORT` of host 0.
    """

    client: Any
    host: int
    num_hosts: int
    address: str

    def write(self, name: str, text: str) -> None:
        """Pins a text, over an older one of this name.

        Raises:
            BoardGoneError: host 0 does not answer.
        """
        with _translated():
            self.client.key_value_set(f"{ROOT}/{name}", text, allow_overwrite=True)

    def read(self, name: str) -> str | None:
        """The text of this name; None where there is none.

        Raises:
            BoardGoneError: host 0 does not answer.
        """
        with _translated():
            try:
                return self.client.key_value_try_get(f"{ROOT}/{name}")
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    return None
                raise

    def read_all(self, folder: str) -> dict[str, str]:
        """The texts whose names begin with `folder/`, by the rest of their names.

        Raises:
            BoardGoneError: host 0 does not answer.
        """
        with _translated():
            entries = self.client.key_value_dir_get(f"{ROOT}/{folder}/")
        return {key.rpartition("/")[2]: text for key, text in entries}

    def wait_for(self, name: str, seconds: float) -> str | None:
        """The text of this name as soon as it is there; None after `seconds`.

        Raises:
            BoardGoneError: host 0 does not answer.
        """
        try:
            return self.client.blocking_key_value_get(f"{ROOT}/{name}", int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise BoardGoneError(str(error)) from error

    def reachable(self, seconds: float = 2.0) -> bool:
        """Whether host 0 still listens."""
        name, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=seconds).close()
        except OSError:
            return False
        return True

    def leave_last(self, seconds: float = LEAVING) -> None:
        """On host 0, which keeps the board: returns when all others have said that they leave, or after `seconds`."""
        if self.host:
            return
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BoardGoneError):
            while len(self.read_all("left").keys() - {"0"}) < self.num_hosts - 1 and time.monotonic() < deadline:
                time.sleep(0.1)


def open_board() -> Board | None:
    """The board of the hosts that have joined; None for a single process."""
    if jax.process_count() == 1:
        return None
    from jax._src import distributed  # jax has no public face for the client that its own libraries use

    state = distributed.global_state
    assert state.coordinator_address is not None, "jax has several processes, so it has joined them"
    return Board(
        client=state.client,
        host=jax.process_index(),
        num_hosts=jax.process_count(),
        address=state.coordinator_address,
    )


@contextlib.contextmanager
def _translated():
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise BoardGoneError(str(error)) from error
