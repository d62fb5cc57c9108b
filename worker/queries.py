"""QueryListener takes queries from Redis, lets the engine encode them, and sends the answers.

Its threads and connections are separate from Celery's. It knows nothing about the API or Postgres. It logs
neither the text of a query nor the message of an error, which may quote a text.
"""

import logging
import threading
from collections import deque
from contextlib import suppress
from typing import Final, Protocol

import numpy as np
from redis.exceptions import RedisError

from vectormill.broker.queries import (
    PULSE_SECONDS,
    Answer,
    EncodedTexts,
    NotEncoded,
    Query,
    QueryAccepted,
    QueryConsumer,
    UnreadableMessage,
    read_spec,
)
from vectormill.domain.errors import ChunkError
from vectormill.domain.task import REPRESENTATIONS
from vectormill.tracing import NOTHING, span
from worker.engine.request import EncodeRequest, EncodeResult
from worker.engine.request_queue import QUERY_PLACES

logger = logging.getLogger(__name__)

AWAY_SECONDS: Final = 0.1


class QueryEngine(Protocol):
    """The part of an engine that queries need."""

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult: ...

    def is_healthy(self) -> bool: ...


class QueryListener:
    """Answers queries on its own threads, from `start` until `stop` returns.

    Call `start` when the engine can encode.
    """

    def __init__(self, consumer: QueryConsumer, engine: QueryEngine, worker: str) -> None:
        self._consumer = consumer
        self._engine = engine
        self._worker = worker
        self._in_hand: set[bytes] = set()
        # A query that is put into Redis again is not encoded again.
        self._served: deque[bytes] = deque(maxlen=1024)
        self._refusals: set[str] = set()  # the reasons that were logged
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        # With several threads, one query is tokenized while another is encoded, and the engine puts both into
        # one batch.
        self._threads = [
            threading.Thread(target=self._listen, name=f"queries {number}", daemon=True)
            for number in range(QUERY_PLACES)
        ]
        self._pulse = threading.Thread(target=self._beat, name="queries pulse", daemon=True)

    def start(self) -> None:
        for thread in (self._pulse, *self._threads):
            thread.start()

    def stop(self, seconds: float = 2.0) -> None:
        """Take no more queries, and wait up to `seconds` for each thread.

        The API gives a query that is not answered by then to another worker.
        """
        self._stopping.set()
        with suppress(RedisError):
            self._consumer.wake(len(self._threads))
        for thread in (*self._threads, self._pulse):
            thread.join(seconds)
        with suppress(RedisError):
            self._consumer.leave()
        self._consumer.close()

    def _beat(self) -> None:
        is_away = False
        while not self._stopping.wait(PULSE_SECONDS):
            if not self._engine.is_healthy():
                continue  # the engine is dead, and the watchdog will end this worker
            with self._lock:
                in_hand = set(self._in_hand)
            try:
                self._consumer.beat(in_hand)
                is_away = False
            except RedisError as error:
                if not is_away:
                    logger.warning("Queries are waiting because Redis is not responding: %s", error)
                is_away = True

    def _listen(self) -> None:
        while not self._stopping.is_set():
            try:
                query = self._consumer.take()
            except RedisError:
                self._stopping.wait(AWAY_SECONDS)  # the pulse thread has logged the error
            except UnreadableMessage as error:
                if error.reason not in self._refusals:
                    self._refusals.add(error.reason)
                    logger.error("Skipped a query, and will skip such ones without a word: %s", error)
            else:
                if query is not None and not self._consumer.is_expired(query):
                    self._serve(query)

    def _serve(self, query: Query) -> None:
        with self._lock:
            if query.id in self._served:
                return
            self._served.append(query.id)
            self._in_hand.add(query.id)
        try:
            self._consumer.answer(query, QueryAccepted(query.id, self._worker))
            # The span is in the trace of the first request that waits for the query, with links to other traces.
            first, *others = query.traceparents or ("",)
            texts = len(query.texts)
            traced = span("encode query", kind="consumer", parent=first, links=others, texts=texts)
            with traced if first else NOTHING as note:
                answer = self._encode(query)
                if isinstance(answer, NotEncoded):
                    note.fail(answer.reason)
            self._consumer.answer(query, answer)
        except RedisError as error:
            logger.warning("A query was not answered because Redis is not responding: %s", error)
        finally:
            with self._lock:
                self._in_hand.discard(query.id)

    def _encode(self, query: Query) -> Answer:
        """Encode the query.

        An error becomes an answer: the API tries the query once more in another batch.
        """
        try:
            request = EncodeRequest(
                f"query {query.id.hex()}",
                read_spec(query.spec),
                query.texts,
                interactive=True,
                max_text_chars=query.max_text_chars,
            )
            encoded = self._engine.encode(request, self._stopping)
        # The process died or was stopped; the messages of these errors quote no text.
        except ChunkError as error:
            return NotEncoded(query.id, str(error))
        except Exception as error:  # noqa: BLE001 - of any tokenizer or driver; its words may quote a text
            logger.error("A query was not encoded: %s", type(error).__name__)
            return NotEncoded(query.id, f"the worker failed with {type(error).__name__}")
        has_vectors = request.spec.result != REPRESENTATIONS
        values = np.ascontiguousarray(encoded.vectors if has_vectors else encoded.results.covered)
        sizes = b"" if has_vectors else encoded.results.lengths.astype("<i4").tobytes()
        failures = {number: failure.detail for number, failure in encoded.failures.items()}
        return EncodedTexts(
            query.id,
            values.shape[1] if has_vectors else 0,
            values.astype("<f4", copy=False).tobytes() if has_vectors else values.tobytes(),
            failures,
            np.ascontiguousarray(encoded.num_tokens, dtype="<i4").tobytes(),
            np.flatnonzero(encoded.truncated).tolist(),
            sizes,
        )
