"""A receiver of webhooks for tests: a small HTTP server that keeps messages and answers as configured."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook


@dataclass(frozen=True)
class Message:
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def verify(self, secret: str) -> dict[str, Any]:
        """Return the event. Raise WebhookVerificationError as a real receiver would."""
        event: dict[str, Any] = Webhook(secret).verify(self.body, self.headers)
        return event


@dataclass
class Receiver:
    """The configuration and the messages of a receiver.

    `answer` is called with each message and returns the status, or the status and headers.
    """

    url: str = ""
    answer: Callable[[Message], int | tuple[int, Mapping[str, str]]] = lambda message: 204
    messages: list[Message] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            message = Message({name.lower(): value for name, value in self.headers.items()}, body)
            receiver.messages.append(message)
            answer = receiver.answer(message)
            status, headers = answer if isinstance(answer, tuple) else (answer, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a sender that gave up is no failure here
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="receiver")
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
