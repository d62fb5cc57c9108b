"""Turn SIGINT, SIGTERM and SIGHUP into an event that threads can wait for."""

import signal
import threading
from queue import SimpleQueue
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """A context manager that returns an event, which is set by SIGINT, SIGTERM or SIGHUP.

    Leaving the block restores the earlier handlers. Main thread only.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._arrived: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._forward, name="stop-signals", daemon=True)
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> threading.Event:
        self._thread.start()
        for number in STOP_SIGNALS:
            self._earlier[number] = signal.signal(number, self._note)
        return self._event

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._arrived.put(None)
        self._thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Event.set() takes a lock that the interrupted code may hold; SimpleQueue.put() is safe in a handler.
        self._arrived.put(number)

    def _forward(self) -> None:
        while self._arrived.get() is not None:
            self._event.set()
