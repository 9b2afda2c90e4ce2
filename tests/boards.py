"""A board in memory, for tests of what hosts say to each other without starting any."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

from maxdiffusion.parallel.board import Board


class Service:
    """What jax's coordination service keeps; `gone` makes every call fail as it does without host 0."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()
        self.gone = False

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        self._answer()
        with self.changed:
            if key in self.texts and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.texts[key] = text
            self.changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        self._answer()
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.texts[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self._answer()
        return [(key, text) for key, text in self.texts.items() if key.startswith(folder)]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self._answer()
        deadline = time.monotonic() + milliseconds / 1000
        with self.changed:
            while key not in self.texts:
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.texts[key]

    def _answer(self) -> None:
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")


def boards(num_hosts: int, service: Any | None = None) -> list[Board]:
    """The board as each host sees it."""
    service = Service() if service is None else service
    return [Board(client=service, host=host, num_hosts=num_hosts, address="127.0.0.1:1") for host in range(num_hosts)]
