"""Serve the explorer on the loopback interface.

The server binds to 127.0.0.1 and refuses requests for another host name, so no web page can reach it through a DNS name
that points here. It answers GET only, with the files of the package and the data of `routes`.
"""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

from embedlayer.errors import EmbedLayerError, FileError
from embedlayer.explorer.page_files import TYPES, served_files
from embedlayer.explorer.routes import answer
from embedlayer.explorer.source_facts import check_tokenizers
from embedlayer.explorer.table_map import map_job
from embedlayer.sources import OpenedModel

HOST = "127.0.0.1"
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
    """Serve the page on 127.0.0.1 until Ctrl-C, and then return.

    Args:
        sources: The sources to show.
        port: The port; 0 chooses a free one.
        on_start: Function that is called with the page's URL when the server listens.

    Raises:
        FileError: The port cannot be used.
        TokenizerError: A tokenizer has IDs outside its table.
    """
    with make_server(sources, port=port) as server:
        on_start(address(server))
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def make_server(sources: list[OpenedModel], *, port: int = 0) -> ThreadingHTTPServer:
    """Return a server that listens on 127.0.0.1; it answers requests once `serve_forever` is called.

    Args:
        sources: The sources to show.
        port: The port; 0 chooses a free one.

    Raises:
        FileError: The port cannot be used.
        TokenizerError: A tokenizer has IDs outside its table.
    """
    check_tokenizers(sources)
    try:
        return _Server(sources, (HOST, port), partial(_Handler, sources, served_files()))
    except (OSError, OverflowError) as error:
        raise FileError(f"Cannot listen on {HOST}:{port}: {error}. Leave --port out to take a free one.") from error


def address(server: ThreadingHTTPServer) -> str:
    """Return the URL of the page that a server shows, such as `http://127.0.0.1:8000/`."""
    return f"http://{HOST}:{server.server_address[1]}/"


class _Server(ThreadingHTTPServer):
    """HTTP server whose `server_close` ends all connections and computations, and waits for their threads.

    A thread that is inside torch while Python exits would abort the process. `http.server` closes no connection by
    itself, so an idle connection would keep its thread for `_Handler.timeout` seconds.
    """

    daemon_threads = False  # so that server_close waits for them

    def __init__(self, sources: list[OpenedModel], *arguments: Any) -> None:
        self._connections: WeakSet[socket.socket] = WeakSet()
        self._sources = sources
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        self._connections.add(connection)
        return connection, client

    def server_close(self) -> None:
        for source in self._sources:
            map_job(source).cancel()
        for connection in list(self._connections):
            with suppress(OSError):  # the connection has already closed
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answer the HTTP GET requests of one connection, with files of the page or data of the sources.

    Requests for another host name than 127.0.0.1 and localhost are refused.
    """

    server_version = "embedlayer"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60
    wbufsize = 1 << 16  # head and body leave together: apart, the second waits 40 ms for a delayed acknowledgement

    def __init__(self, sources: list[OpenedModel], static: dict[str, bytes], *arguments: Any) -> None:
        self.sources = sources
        self.static = static
        super().__init__(*arguments)

    def do_GET(self) -> None:
        port = self.server.server_address[1]  # type: ignore[index]
        if self.headers.get("Host") not in {f"{HOST}:{port}", f"localhost:{port}"}:
            return self._say(HTTPStatus.FORBIDDEN, "This server answers requests for 127.0.0.1 and localhost only.")
        place = urlsplit(self.path)
        name = unquote(place.path).removeprefix("/") or "index.html"
        if name.startswith("data/"):
            return self._data(name.removeprefix("data/"), dict(parse_qsl(place.query, keep_blank_values=True)))
        if name not in self.static:
            return self._say(HTTPStatus.NOT_FOUND, "There is no such file.")
        return self._send(HTTPStatus.OK, TYPES[PurePosixPath(name).suffix], self.static[name])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing, so that requests do not fill the terminal."""

    def _data(self, name: str, params: dict[str, str]) -> None:
        """Send the data of a route, as bytes or as JSON.

        An error of the request is sent as JSON, with status 400. Any other exception is sent with status 500 and raised
        again.

        Args:
            name: Name of the data, see `routes.answer`.
            params: Parameters of the request.
        """
        try:
            found = answer(self.sources, name, params)
        except EmbedLayerError as error:
            return self._say(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed; its terminal shows the error.")
            raise
        if isinstance(found, bytes):
            return self._send(HTTPStatus.OK, "application/octet-stream", found)
        return self._send(HTTPStatus.OK, "application/json", to_json(found))

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        """Send an error to the page, as the JSON object `{"error": sentence}`."""
        self._send(status, "application/json", to_json({"error": sentence}))

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        """Send a response with the common headers. If the browser has closed the connection, nothing is raised.

        Args:
            status: HTTP status.
            kind: Media type of the content.
            content: Body of the response.
        """
        try:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the page was closed or went on to something else
            self.close_connection = True


def to_json(value: Any) -> bytes:
    """Return a value as JSON text in bytes, with all characters outside ASCII escaped, lone surrogates included.

    Raises:
        ValueError: The value contains NaN or infinity.
    """
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
