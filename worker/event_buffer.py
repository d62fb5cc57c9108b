"""BufferingConsumer: Celery's consumer, which sends its events for Flower together and not one by one."""

from typing import Any, Final

from celery.worker.consumer import Consumer

# Three events a chunk, each a message to Redis of its own: a third of what a message costs. Flower may hear so late, or
# when there are 24.
_FLUSH_SECONDS: Final = 0.25


class BufferingConsumer(Consumer):
    """Flushes what is buffered by the clock. Celery cancels the timer with the loop that it was made for."""

    def register_with_event_loop(self, hub: Any) -> None:
        super().register_with_event_loop(hub)
        hub.call_repeatedly(_FLUSH_SECONDS, self._flush_events)

    def on_send_event_buffered(self) -> None:
        """Instead of a flush at the next turn of the loop: nothing."""
