"""Small HTTP servers for tests, each in a thread of its own; this module does not know what they answer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that writes no log; `answer` answers requests of every method."""

    def answer(self) -> None:
        raise NotImplementedError

    def _answer(self) -> None:
        self.answer()

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815  # the names are http.server's

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, content: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving_http(handler: Any, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve on a port, by default a free one, while the block runs; yield the URL."""
    with ThreadingHTTPServer((host, port), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that gave up is no failure here
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="http server")
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
