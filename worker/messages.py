"""What a worker takes from its queue: dispatches of the scheduler, though anybody who reaches Redis can write there.

Celery would also take messages that are held in memory until a time, that send others when they end, and tasks of
its own; and kombu would expand a compressed message to any size.
"""

from collections.abc import Callable
from typing import Any, Final

from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.worker.strategy import default as handle_by_celery
from kombu import compression

DISPATCH: Final = {"chunk_id": int, "dispatch_seq": int}


def refuse_compression(content: bytes) -> bytes:
    """Raise ValueError: no message of ours is compressed."""
    raise ValueError("messages are not compressed")


def forget_foreign_tasks(app: Celery) -> None:
    """Unregister Celery's own tasks, and whatever would expand a message, in this process."""
    for name in list(app.tasks):
        app.tasks.unregister(name)
    for name in compression.encoders():
        compression.register(refuse_compression, refuse_compression, name)


def handle_dispatches(task: Any, app: Celery, consumer: Any) -> Callable[..., Any]:
    """Return the function by which Celery's worker handles messages, and which refuses all but dispatches."""
    handle = handle_by_celery(task, app, consumer)

    def handle_dispatch(message: Any, *rest: Any) -> Any:
        try:
            args, kwargs, embed = message.payload
            is_ours = {name: type(value) for name, value in kwargs.items()} == DISPATCH
            is_plain = not (args or message.headers.get("eta") or any(embed.values()))
        except (TypeError, ValueError, AttributeError):
            is_ours = is_plain = False
        if not (is_ours and is_plain):
            raise InvalidTaskError("this is no message of the scheduler")
        return handle(message, *rest)

    return handle_dispatch
