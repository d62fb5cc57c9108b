"""A receiver of webhooks for tests: a small HTTP server that keeps messages and answers as configured."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from standardwebhooks import Webhook

from tests.http_server import QuietHandler, serving_http


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

    class Handler(QuietHandler):
        def answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            message = Message(headers, self.read_body())
            receiver.messages.append(message)
            told = receiver.answer(message)
            status, sent = told if isinstance(told, tuple) else (told, {})
            self.reply(status, headers=sent)

    with serving_http(Handler) as url:
        receiver.url = f"{url}/hook"
        yield receiver
