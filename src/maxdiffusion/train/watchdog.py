"""Nothing hangs silently: who is late with a step, and who is gone, is said in one line that names the host.

Every host pins a sign of life on the board (`parallel.board`): its name, its last step, what it is doing. That needs no
shared file system and no collective, which is just what hangs. Each host looks after the next one in a ring, so that a
thousand hosts cost the board two thousand small calls an interval and not a million.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from maxdiffusion.errors import HOST_GONE, HostGoneError
from maxdiffusion.parallel.board import Board, BoardGoneError, open_board

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between signs of life."""

MISSED = 4
"""Intervals without a sign of life that name a host after a collective has failed: its connections broke already."""

GRACE = 5.0
"""Seconds that the main thread has to end by itself after another host has left."""


ENDED = "ended"
"""What a host does whose run has ended well: it gives no more signs of life, and is not gone."""

NO_HOST_0 = (
    "host 0, which coordinates the others, is gone; this host stops; start all hosts again with resume=true to go on "
    "from the last checkpoint"
)


class Watchdog:
    """Watches the steps of this host and the life of the others, in a thread of its own; a context manager.

    Attributes:
        board: of all hosts; None with a single one.
    """

    def __init__(
        self,
        *,
        seconds: float | None,
        host_seconds: float = 100.0,
        board: Board | None = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing runs before the context is entered.

        Args:
            seconds: that a step may take before the late host is named; None for any.
            host_seconds: without a sign of life after which a host counts as gone.
            board: of all hosts; None opens that of this process.
            end: ends the process with a line; None says the line and exits with status 3.
        """
        self.board = open_board() if board is None else board
        self._seconds, self._host_seconds = seconds, host_seconds
        self._end = self._say_and_exit if end is None else end
        self._me = {"name": socket.gethostname(), "pid": os.getpid()}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._settled: int | None = None
        self._since = self._mark = time.monotonic()
        self._pace: float | None = None
        self._doing = "starting"
        self._named: int | None = None
        self._abort: Any = None
        self._count = 0
        self._seen: tuple[str, float] = ("", time.monotonic())

    def __enter__(self) -> Watchdog:
        if self.board is not None or self._seconds is not None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        if self.board is not None and self.board.host:
            self._abort = _say_on_abort(self.board)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._stopped.set()
        if self._abort is not None:
            _libc().signal(signal.SIGABRT, None)
        if self.board is None:
            return
        if error is None:
            self._say_that_all_is_done()
            return
        gone = None
        if _of_jax(error):
            gone = self._diagnose()
        self._farewell(gone or f"{type(error).__name__}: {_first_line(error)}")
        if gone is not None:
            raise HostGoneError(gone) from error

    def step(self, done: int) -> None:
        """Step `done` has been handed to the devices, which may still be at earlier ones."""
        with self._lock:
            self._step, self._since, self._doing = done, time.monotonic(), "training"
            if self._settled is None:
                self._settled, self._mark = done - 1, self._since

    def settled(self, done: int) -> None:
        """The devices have finished step `done`."""
        with self._lock:
            self._since = time.monotonic()
            if self._settled is not None and done > self._settled:
                self._pace = (self._since - self._mark) / (done - self._settled)
            self._settled, self._mark = done, self._since

    def finished(self) -> None:
        """There are no more steps; what follows may take as long as it takes."""
        with self._lock:
            self._doing = "ending"

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something that is not a step, such as a checkpoint, and may take as long as it takes."""
        with self._lock:
            before, self._doing = self._doing, what
        try:
            yield
        finally:
            with self._lock:
                self._doing, self._since = before, time.monotonic()
                self._mark = self._since

    # --- In the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = min(INTERVAL, self._host_seconds / 5, *([self._seconds / 4] if self._seconds else []))
        while not self._stopped.wait(interval):
            try:
                self._look()
            except BoardGoneError:
                if not self._stopped.wait(GRACE):
                    self._end(NO_HOST_0)
                return

    def _look(self) -> None:
        if self.board is not None:
            self._sign()
            left = self.board.read_all("left")
            if left and not self._stopped.wait(GRACE):
                host, why = next(iter(left.items()))
                self._end(f"host {host} has left, and this host stops too; it said: {why}")
                return
            gone = self._gone_neighbour()
            if gone:
                self._end(gone)
                return
        late = self._late()
        if late:
            log.warning("%s", late)
            _dump_stacks()

    def _sign(self) -> None:
        assert self.board is not None
        with self._lock:
            self._count += 1
            sign = {**self._me, "step": self._step, "doing": self._doing, "count": self._count}
        self.board.write(f"life/{self.board.host}", json.dumps(sign))

    def _gone_neighbour(self) -> str | None:
        """The line about the next host in the ring, where its sign of life has been the same for too long."""
        assert self.board is not None
        neighbour = str((self.board.host + 1) % self.board.num_hosts)
        now, text = time.monotonic(), self.board.read(f"life/{neighbour}") or ""
        if text != self._seen[0]:
            self._seen = (text, now)
            return None
        silent = now - self._seen[1]
        if silent <= self._host_seconds or _has_ended(text):
            return None
        return _gone_line({neighbour: text}, silent)

    def _late(self) -> str | None:
        """The line about a step that takes too long, once a step."""
        with self._lock:
            step, doing = self._step, self._doing
            behind = max(step - (self._settled or 0), 1)
            waited, pace = time.monotonic() - self._since, self._pace
        if self._seconds is None or doing != "training" or self._named == step:
            return None
        # The devices may be steps behind what was handed out: these take as long as steps took, if that is known.
        if waited <= self._seconds + (behind - 1) * (self._seconds if pace is None else min(pace, self._seconds)):
            return None
        self._named = step
        head = f"step {step + 1} is late: nothing for {waited:.0f} s (train.watchdog_seconds={self._seconds:g})"
        if self.board is None:
            return f"{head}; this process's stacks follow"
        signs = {int(host): json.loads(text) for host, text in self.board.read_all("life").items()}
        slowest = min(sign["step"] for sign in signs.values())
        late = {host: sign for host, sign in sorted(signs.items()) if sign["step"] == slowest}
        if len(late) == len(signs):
            return f"{head}: every host has handed out step {step}, so a device or a connection hangs; stacks follow"
        names = ", ".join(f"host {host} ({_called(sign)})" for host, sign in late.items())
        return f"{head}: {names} has not come beyond step {slowest}, this is host {self.board.host}; its stacks follow"

    # --- At the end ---------------------------------------------------------------------------------------------------

    def _diagnose(self) -> str | None:
        """After a collective has failed: the hosts that no longer give a sign of life, or have said why they left."""
        assert self.board is not None
        try:
            before = self.board.read_all("life")
            deadline = time.monotonic() + MISSED * INTERVAL
            while time.monotonic() < deadline:
                self._sign()
                left = self.board.read_all("left")
                if left:
                    host, why = next(iter(left.items()))
                    return f"host {host} has left, and this host stops too; it said: {why}"
                time.sleep(INTERVAL / 4)
            after = self.board.read_all("life")
        except BoardGoneError:
            return NO_HOST_0
        mine = str(self.board.host)
        silent = {
            host: text
            for host, text in after.items()
            if host != mine and before.get(host) == text and not _has_ended(text)
        }
        return _gone_line(silent, MISSED * INTERVAL) if silent else None

    def _say_that_all_is_done(self) -> None:
        """The last sign of life of a host whose run has ended well; others may be at it still, and must not miss it."""
        if self._thread is not None:
            self._thread.join(INTERVAL)  # whose sign would come after this one
        with self._lock:
            self._doing = ENDED
        with contextlib.suppress(BoardGoneError):  # host 0 was faster
            self._sign()

    def _say_and_exit(self, line: str) -> None:
        """Ends the process although its main thread may be stuck in a collective that will never end."""
        log.error("error: %s", line)
        assert self.board is not None
        self._farewell(line)
        self.board.leave_last()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(HOST_GONE)

    def _farewell(self, why: str) -> None:
        assert self.board is not None
        with contextlib.suppress(BoardGoneError):  # then nobody is left to read it
            self.board.write(f"left/{self.board.host}", why)


def _has_ended(text: str) -> bool:
    """Whether a sign of life is the last one of a host whose run has ended well."""
    return bool(text) and json.loads(text)["doing"] == ENDED


def _gone_line(silent: dict[str, str], seconds: float) -> str:
    names = []
    for host, text in sorted(silent.items(), key=lambda item: int(item[0])):
        sign = json.loads(text) if text else None
        names.append(f"host {host} ({_called(sign)}, last seen after step {sign['step']})" if sign else f"host {host}")
    return (
        f"{', '.join(names)} is gone: no sign of life for {seconds:.0f} s; this host stops; start all hosts again with "
        "resume=true to go on from the last checkpoint"
    )


def _called(sign: dict[str, Any]) -> str:
    return f"{sign['name']}, pid {sign['pid']}" + ("" if sign["doing"] == "training" else f", {sign['doing']}")


def _of_jax(error: BaseException | None) -> bool:
    """Whether an error comes from jax's runtime, be it wrapped in another."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _say_on_abort(board: Board) -> Any:
    """Says that host 0 is gone where jax ends this process for it, which it does at once and by aborting.

    A handler in Python would wait for a main thread that may be stuck; this one runs in the thread that aborts.

    Returns:
        The handler, which must be kept.
    """

    def aborted(_: int) -> None:
        if not board.reachable():
            os.write(2, f"error: {NO_HOST_0}\n".encode())
            os._exit(HOST_GONE)
        _libc().signal(signal.SIGABRT, None)  # another cause: it ends as it would have

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _libc().signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return handler


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    return library


def _dump_stacks() -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
