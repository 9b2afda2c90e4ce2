"""An object store in this process: one set of objects behind fsspec's `gs://` and behind Google's HTTP interface.

etils reads and writes through the first, TensorStore's driver through the second; no network is used.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from fsspec.implementations.memory import MemoryFileSystem


class Store(MemoryFileSystem):
    """fsspec's face of the objects: a flat set of names, where folders are only beginnings of names."""

    protocol = ("gcs", "gs")
    cachable = False
    store: ClassVar[Any] = {}
    pseudo_dirs: ClassVar[Any] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")


class _Face(BaseHTTPRequestHandler):
    """The part of the JSON interface that TensorStore uses."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _place(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        words = parts.path.split("/b/", 1)[1].split("/o", 1)
        return unquote(words[0]), unquote(words[1].lstrip("/")), query

    def do_GET(self) -> None:
        bucket, name, query = self._place()
        if not name:
            prefix = f"/{bucket}/{query.get('prefix', '')}"
            names = sorted(key for key in list(Store.store) if key.startswith(prefix))
            items = [
                {
                    "name": key.removeprefix(f"/{bucket}/"),
                    "size": str(Store.store[key].size),
                    "generation": str(_generations.get(key, 1)),
                }
                for key in names
            ]
            self._answer(200, json.dumps({"items": items}).encode(), Content_Type="application/json")
            return
        key = f"/{bucket}/{name}"
        file = Store.store.get(key)
        if file is None:
            self._answer(404)
            return
        generation = str(_generations.get(key, 1))
        wanted = query.get("ifGenerationMatch")
        if wanted not in (None, generation):
            self._answer(412)
            return
        if query.get("ifGenerationNotMatch") == generation:
            self._answer(304)
            return
        content = file.getvalue()
        headers = {"x_goog_generation": generation, "Content_Type": "application/octet-stream"}
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else len(content) - int(last)
            stop = int(last) + 1 if first and last else len(content)
            part = content[start:stop]
            headers["Content_Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            self._answer(206, part, **headers)
            return
        self._answer(200, content, **headers)

    def do_POST(self) -> None:
        bucket, _, query = self._place()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = query["name"]
        key = f"/{bucket}/{name}"
        with _lock:
            present = key in Store.store
            wanted = query.get("ifGenerationMatch")
            if wanted is not None and wanted != (str(_generations.get(key, 1)) if present else "0"):
                self._answer(412)
                return
            Store().pipe_file(f"gs://{bucket}/{name}", content)
            _generations[key] = _generations.get(key, 1) + 1
        told = {"name": name, "generation": str(_generations[key]), "size": str(len(content))}
        self._answer(200, json.dumps(told).encode(), Content_Type="application/json")

    def do_DELETE(self) -> None:
        bucket, name, _ = self._place()
        found = Store.store.pop(f"/{bucket}/{name}", None)
        self._answer(404 if found is None else 204)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


_generations: dict[str, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """Serves an empty store; yields the address of its HTTP face."""
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    _generations.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Face)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
