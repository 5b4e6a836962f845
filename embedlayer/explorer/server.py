"""Serve the explorer on the loopback interface.

The server binds to 127.0.0.1 and refuses requests for another host name, so no web page can reach it through a DNS name
that points here. It answers GET with the files of the package and the data of `routes`. Requests that start or end a
computation are POST, and must come from the page itself.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import CheckpointError, EmbedLayerError, FileError
from embedlayer.explorer.page_files import TYPES, served_files
from embedlayer.explorer.routes import answer, check_tokenizers, method_of
from embedlayer.explorer.table_map import map_job
from embedlayer.io.mapped_rows import default_resident_bytes
from embedlayer.opening.opened_model import OpenedModel

HOST = "127.0.0.1"
SECONDS_WITHOUT_ACCEPT = 0.1
"""Pause of the server after a connection that the system could not open, as this process has too many files open."""

MAPPED = (".safetensors", ".gguf")
"""Ends of the names of files whose tensors may be mapped."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(sources: list[OpenedModel], *, port: int = 0, on_start: Callable[[str], None]) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C, and then return."""
    with make_server(sources, port=port) as server:
        on_start(address(server))
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def make_server(sources: list[OpenedModel], *, port: int = 0) -> ThreadingHTTPServer:
    """Return a server that listens on 127.0.0.1; it answers requests once `serve_forever` is called."""
    check_tokenizers(sources)
    mapped = [file for source in sources if not _moved_to_memory(source) for file in _mapped_files(source)]
    try:
        return _Server(mapped, sources, (HOST, port), partial(_Handler, sources, served_files()))
    except (OSError, OverflowError) as error:
        raise FileError(f"Cannot listen on {HOST}:{port}: {error}. Leave --port out to take a free one.") from error


def address(server: ThreadingHTTPServer) -> str:
    """Return the URL of the page that a server shows, such as `http://127.0.0.1:8000/`."""
    return f"http://{HOST}:{server.server_address[1]}/"


def _moved_to_memory(source: OpenedModel) -> bool:
    """Copy the tensors of a source from its files to memory, unless they are large; return whether they were copied."""
    # A mapped file that is cut short, as by `open(file, "wb")`, ends the process that reads it by SIGBUS.
    modules = [module for module in (source.table, source.model) if module is not None]
    tensors = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}.values()
    if default_resident_bytes(sum(tensor.nbytes for tensor in tensors)) is not None:
        return False
    for tensor in tensors:
        if device_kind(tensor) == "cpu":
            tensor.data = tensor.data.clone()
    return True


def _mapped_files(source: OpenedModel) -> list[tuple[Path, os.stat_result]]:
    """Return the files to which tensors of a source may be mapped, as they are now; none for a name on the hub."""
    path = Path(source.source or os.devnull)
    files = [path] if path.is_file() else [each for ending in MAPPED for each in path.rglob(f"*{ending}")]
    return [(file, file.stat()) for file in files if file.is_file()]


class _Server(ThreadingHTTPServer):
    """HTTP server whose `server_close` ends all connections and computations, and waits for their threads."""

    # A thread inside torch while Python exits would abort the process. `http.server` closes no connection by itself, so
    # an idle one would keep its thread for `_Handler.timeout` seconds.

    daemon_threads = False  # so that server_close waits for them
    request_queue_size = 128  # http.server has 5: of more requests at once, Linux would lose some

    def __init__(self, mapped: list[tuple[Path, os.stat_result]], sources: list[OpenedModel], *arguments: Any) -> None:
        self._mapped = mapped
        self._connections: WeakSet[socket.socket] = WeakSet()
        self._sources = sources
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, client = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(SECONDS_WITHOUT_ACCEPT)  # the connection still waits: without a pause, this loop would spin
            raise
        self._connections.add(connection)
        return connection, client

    def check_files(self) -> None:
        """Raise a `CheckpointError` if a file that may be mapped was written again; one that was replaced is served."""
        for file, before in self._mapped:
            with suppress(FileNotFoundError):  # the deleted one is still mapped
                now = file.stat()
                same = (now.st_ino, now.st_dev) == (before.st_ino, before.st_dev)
                if same and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    raise CheckpointError(
                        f"{file} was written again since it was opened. Start embedlayer explore again."
                    )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error in a connection, unless the client has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        for source in self._sources:
            map_job(source).cancel()
        for connection in list(self._connections):
            with suppress(OSError):  # the connection has already closed
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answer the HTTP requests of one connection, with files of the page or data of the sources."""

    # Requests for another host name than 127.0.0.1 or localhost are refused (DNS rebinding).

    server: "_Server"
    server_version = "embedlayer"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60
    wbufsize = 1 << 16  # head and body leave together
    disable_nagle_algorithm = True  # what is longer leaves in parts: the last would wait 40 ms for an acknowledgement

    def __init__(self, sources: list[OpenedModel], static: dict[str, bytes], *arguments: Any) -> None:
        self.sources = sources
        self.static = static
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request for a file of the page, or for data."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer a request of the page that starts or ends a computation."""
        self._answer("POST")

    def _answer(self, method: str) -> None:
        """Answer a request, or say why it is refused."""
        port = self.server.server_address[1]
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read
            return self._say(HTTPStatus.BAD_REQUEST, "A request has no body.")
        if self.headers.get("Host") not in hosts:
            return self._say(HTTPStatus.FORBIDDEN, "This server answers requests for 127.0.0.1 and localhost only.")
        if method == "POST" and self.headers.get("Origin") not in {f"http://{host}" for host in hosts}:
            return self._say(HTTPStatus.FORBIDDEN, "Only the page of this server may request this.")
        try:
            place = urlsplit(self.path)
            params = dict(parse_qsl(place.query, keep_blank_values=True))
        except ValueError:  # such as http://[
            return self._say(HTTPStatus.BAD_REQUEST, "The address of the request is not valid.")
        name = unquote(place.path).removeprefix("/") or "index.html"
        data = name.removeprefix("data/") if name.startswith("data/") else None
        if method != (allowed := "GET" if data is None else method_of(data)):
            return self._say(HTTPStatus.METHOD_NOT_ALLOWED, f"{name} is requested with {allowed}.", Allow=allowed)
        if data is not None:
            return self._data(data, params)
        if name not in self.static:
            return self._say(HTTPStatus.NOT_FOUND, "There is no such file.")
        return self._send(HTTPStatus.OK, TYPES[PurePosixPath(name).suffix], self.static[name])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing, so that requests do not fill the terminal."""

    def _data(self, name: str, params: dict[str, str]) -> None:
        """Send the data of a route, as bytes or as JSON."""
        try:
            self.server.check_files()
            content = answer(self.sources, name, params)
        except EmbedLayerError as error:
            return self._say(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed; its terminal shows the error.")
            raise
        if isinstance(content, bytes):
            return self._send(HTTPStatus.OK, "application/octet-stream", content)
        return self._send(HTTPStatus.OK, "application/json", to_json(content))

    def _say(self, status: HTTPStatus, sentence: str, **headers: str) -> None:
        """Send an error to the page, as the JSON object `{"error": sentence}`."""
        self._send(status, "application/json", to_json({"error": sentence}), **headers)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        """Send a response with the common headers."""
        self.send_response(status)
        if self.close_connection:
            headers["Connection"] = "close"
        headers = {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content)), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def to_json(value: Any) -> bytes:
    """Return a value as JSON text in bytes, with all characters outside ASCII escaped, lone surrogates included."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
