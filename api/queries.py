"""QueryExchange: send the queries of this API process to workers, and receive the answers. It needs the event loop.

Workers encode the texts of searches with the same models as jobs, but with priority. Queries with the same spec are
coalesced into one message: it is sent at once if the workers have few of this process's messages in flight, else when
an answer arrives. A message that was lost with a worker or a Redis is sent once more, each client's texts alone, so
that a text that kills workers cannot fail its neighbours twice.

A request with many texts is sent in parts, so that other requests can come in between, and no message is larger than
one part. Each part has the full time-out of a search: a request of two thousand texts fails if it makes no progress,
and not because it is long. The texts of a search have its deadline.
"""

import asyncio
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi.concurrency import run_in_threadpool
from redis.exceptions import OutOfMemoryError, RedisError
from sqlalchemy import Engine

from api.intake.requests import refuse_text
from api.metrics import QueryMetrics
from vectormill.broker.queries import (
    ID_BYTES,
    PULSE_SECONDS,
    QUERY_KEY,
    Answer,
    EncodedTexts,
    NotEncoded,
    Query,
    QueryAccepted,
    QueryProducer,
    Signer,
    UnreadableMessage,
    name_space,
    write_query,
    write_spec,
)
from vectormill.coalescer import Coalescer
from vectormill.db.session import load_secret
from vectormill.domain.encoding import FAIL, LATE, PASSAGES, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EncodingTimeout, QueryLost, Unavailable
from vectormill.jobs.wait_reasons import explain_query_wait
from vectormill.models.prompt_room import leaves_room, require_room
from vectormill.models.registry import Registry
from vectormill.search.search import Deadline
from vectormill.settings import Settings
from vectormill.tracing import recorded_traceparent, span

# Limits of texts and bytes of one message to a worker. The texts of one part are never split between messages.
MAX_TEXTS: Final = 64
MAX_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 64 << 20
# A request has at most this many parts in flight, so that other requests need not wait for all of it.
PARTS_AT_ONCE: Final = 4
# Each active worker has two messages in flight, so that one is encoded while the next is tokenized.
MESSAGES_PER_WORKER: Final = 2
# A worker counts as active for this long after it last took a message.
KNOWN_SECONDS: Final = 10.0
# The time between two checks if an unanswered message is still queued or with a live worker.
LOOK_SECONDS: Final = 0.1
# The time from posting or taking a message to its first check: a worker's heartbeat, and some time on a busy machine.
FIRST_LOOK_SECONDS: Final = PULSE_SECONDS + 0.3
AWAY_SECONDS: Final = 0.1
# A repeated query may find no worker for this long: if Redis lost its data, workers register again at their next
# heartbeat.
RETURN_SECONDS: Final = PULSE_SECONDS + 0.05
# The time between two attempts to post a query while no worker takes queries.
ABSENCE_SECONDS: Final = 0.25
NO_REDIS: Final = (
    "This API has no connection to Redis, which queries with texts need: set VECTORMILL_REDIS_URL to the "
    "Redis of the workers. Searches by a vector or by words alone do not need it."
)
STOPPING: Final = "The API is stopping; send the query again."
FULL: Final = "Redis accepts no queries because its memory is full; give it more (maxmemory)."
NO_OTHER: Final = (
    "The worker that had the query is gone, and no other worker accepts queries for its model; send the "
    "query again once one is running."
)
TWICE: Final = "The query was not encoded in two attempts: {reason}. Send it again."

logger = logging.getLogger(__name__)


class MessageLost(Exception):
    """The error of a message to a worker that was not answered, or whose answer does not match it."""


class Answered(NamedTuple):
    """The results of one client's texts, or their outputs; each column has one row for each text."""

    # float32 [texts, dimensions], or Representations [texts]; zeros or None for a failure
    vectors: npt.NDArray[Any]
    failures: npt.NDArray[Any]  # the reason why the text cannot be encoded, or None
    token_counts: npt.NDArray[Any]  # int32
    is_truncated: npt.NDArray[Any]  # bool

    @property
    def num_tokens(self) -> int:
        return int(self.token_counts.sum())


@dataclass(frozen=True, slots=True)
class QueryTexts:
    """The texts of one client's request, or of a part of it, that go into one message."""

    texts: Sequence[bytes]
    deadline: Deadline
    traceparent: str | None = None  # the W3C trace context, if the request is traced


@dataclass(slots=True, eq=False, weakref_slot=True)
class Message:
    """A message to the workers that waits for its answer. `taker` is the worker that has taken it, if known."""

    query: Query
    space: str
    content: bytes
    answer: "asyncio.Future[EncodedTexts | NotEncoded]" = field(default_factory=asyncio.Future)
    # The time of the next check for a loss.
    next_look: float = field(default_factory=lambda: time.monotonic() + FIRST_LOOK_SECONDS)
    taker: str | None = None
    is_missed: bool = False  # True if the last check did not find it
    refusal: UnreadableMessage | None = None  # of an answer that was no worker's


class QueryExchange:
    """A client of the workers that encode queries. It connects to Redis and listens for answers on first use."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        registry: Registry,
        metrics: QueryMetrics,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._metrics = metrics
        self._is_stopping = is_stopping
        self._coalescer: Coalescer[EncodingSpec, QueryTexts, Answered] = Coalescer(
            self._send,
            max_waiting=settings.max_requests * PARTS_AT_ONCE,
            max_running_of=lambda spec: self._max_messages(find_space(spec)),
            count=lambda spec, waiting: count_fitting(spec, [asked.texts for asked in waiting]),
            abandons=True,
        )
        self._messages = weakref.WeakValueDictionary[bytes, Message]()  # by id, as long as somebody waits
        self._refusals: set[str] = set()  # the reasons that were logged
        self._takers: dict[tuple[str, str], float] = {}  # by space and worker: when it last took a message
        self._producer: QueryProducer | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def encode_queries(
        self, spec: EncodingSpec, texts: Mapping[str, str], deadline: Deadline
    ) -> list[tuple[Any, bool]]:
        """Return the vectors of checked queries, each float32 [dimensions], in the vector space of `spec`.

        `texts` has them by their JSON pointers in the body. Beside the vectors of each stands if its text was cut. For
        a spec of several outputs they are Representations.

        Raise InvalidOption if the model's query prompt leaves no room for them, Problem if a text cannot be encoded,
        EncodingTimeout if no worker answers in time, QueryLost if the query was lost twice, and Unavailable if
        the API is stopping or has no Redis.
        """
        if not self._registry.is_read(spec.model):
            await run_in_threadpool(self._registry.card, spec.model)
        query_spec = make_query_spec(self._registry, spec)
        if not leaves_room(query_spec):
            await run_in_threadpool(require_room, self._registry.card(spec.model), query_spec)
        pointers = {text: pointer for pointer, text in texts.items()}
        distinct = {pointer: text.encode() for text, pointer in pointers.items()}
        answered = await self.answer(query_spec, distinct, deadline)
        results = zip(answered.vectors, answered.is_truncated.tolist(), strict=True)
        result_of = dict(zip(pointers, results, strict=True))
        return [result_of[text] for text in texts.values()]

    async def answer(
        self, spec: EncodingSpec, texts: Mapping[str, bytes], deadline: Deadline | None = None
    ) -> Answered:
        """Return the results of one or more texts or pairs, sent in parts. Raise errors as in `encode_queries`.

        `texts` has them by their JSON pointers in the body. All parts are answered before the deadline; without one,
        each has the time of a search.
        """
        if self._settings.redis_url is None:
            raise Unavailable(NO_REDIS)
        free = asyncio.Semaphore(PARTS_AT_ONCE)

        async def answer_in_turn(part: Sequence[bytes]) -> Answered:
            async with free:
                own = deadline or Deadline(self._settings.search_timeout_seconds)
                return await self._answer_part(spec, part, own)

        try:
            async with asyncio.TaskGroup() as group:
                parts = cut_parts(spec, [*texts.values()])
                tasks = [group.create_task(answer_in_turn(part)) for part in parts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        answered = Answered(*map(np.concatenate, zip(*(task.result() for task in tasks), strict=True)))
        for pointer, reason in zip(texts, answered.failures, strict=True):
            if reason is not None:
                raise refuse_text(pointer, reason)
        return answered

    async def _answer_part(self, spec: EncodingSpec, texts: Sequence[bytes], deadline: Deadline) -> Answered:
        """Return the results of texts that fit into one message. Wait for a worker that takes queries of this spec."""
        try:
            with (
                self._metrics.time(len(texts)),
                span("query", kind="client", model=spec.model, texts=len(texts), repeated=False) as note,
            ):
                asked = QueryTexts(texts, deadline, recorded_traceparent())
                async with asyncio.timeout(deadline.seconds_left):
                    try:
                        return await self._coalescer.ask(spec, asked)
                    except MessageLost:
                        note.tell(repeated=True)
                        self._metrics.repeats.inc()
                        (answered,) = await self._send(spec, [asked], is_repeated=True)
                        return answered
        except MessageLost as loss:
            raise QueryLost(TWICE.format(reason=str(loss).rstrip("."))) from None
        except TimeoutError:
            reason = await run_in_threadpool(self._explain_wait, spec)
            raise EncodingTimeout(
                f"No worker encoded the query within {deadline.seconds:g} s. {reason}"
            ) from None

    def _explain_wait(self, spec: EncodingSpec) -> str:
        """Return the reason why a query was not answered, in the same words as for a waiting job."""
        with self._engine.connect() as connection:
            reason = explain_query_wait(connection, spec)
        return reason or (
            f"Its worker is slow or busy with other queries; see `vectormill status` for {spec.model}."
        )

    async def close(self) -> None:
        await self._coalescer.close()
        if self._producer is not None and self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            await self._producer.close()

    def _max_messages(self, space: str) -> int:
        """Return how many messages of this space may be in flight, and forget workers that take none any more."""
        now = time.monotonic()
        self._takers = {taker: seen for taker, seen in self._takers.items() if now - seen < KNOWN_SECONDS}
        return MESSAGES_PER_WORKER * max(1, sum(known == space for known, _ in self._takers))

    # ---- to the workers

    async def _send(
        self, spec: EncodingSpec, together: Sequence[QueryTexts], *, is_repeated: bool = False
    ) -> list[Answered]:
        """Send the texts of these clients in one message, and return the answer of each.

        Raise MessageLost, QueryLost if there is no worker for a repeated message, and Unavailable.
        """
        try:
            producer = await self._connect()
            message = await self._post_message(producer, spec, together, is_repeated)
            answer = await self._wait_for_answer(producer, message)
            return split_answer(answer, [len(asked.texts) for asked in together])
        except MessageLost as loss:
            logger.warning("A message of %d queries got no answer: %s", len(together), loss)
            raise

    async def _connect(self) -> QueryProducer:
        if self._producer is None:
            secret = await run_in_threadpool(load_secret, self._engine, QUERY_KEY)
            if self._producer is None:  # nobody has connected meanwhile
                assert self._settings.redis_url is not None
                self._producer = QueryProducer(self._settings.redis_url, Signer(*secret))
                self._receiving = asyncio.create_task(
                    self._receive(self._producer), name="answers to queries"
                )
        return self._producer

    async def _post_message(
        self, producer: QueryProducer, spec: EncodingSpec, together: Sequence[QueryTexts], is_repeated: bool
    ) -> Message:
        """Post a message; retry until Redis accepts it and a worker listens. Raise QueryLost and Unavailable."""
        began = time.monotonic()
        while not self._is_stopping():
            try:
                seconds = max(0.001, *(asked.deadline.seconds_left for asked in together))
                query = Query(
                    secrets.token_bytes(ID_BYTES),
                    producer.address,
                    await producer.find_expiry(seconds),
                    self._settings.max_text_chars,
                    write_spec(spec),
                    [text for asked in together for text in asked.texts],
                    [asked.traceparent for asked in together if asked.traceparent is not None],
                ).sign(producer.signer)
                message = Message(query, find_space(spec), write_query(query))
                self._messages[query.id] = message  # before the answer can arrive
                if await producer.post(message.space, message.content, seconds):
                    self._metrics.messages.inc()
                    return message
                if is_repeated and time.monotonic() >= began + RETURN_SECONDS:
                    raise QueryLost(NO_OTHER)
                await asyncio.sleep(RETURN_SECONDS / 5 if is_repeated else ABSENCE_SECONDS)
            except OutOfMemoryError:
                raise Unavailable(FULL) from None
            except RedisError as error:
                logger.debug("A query is waiting for Redis: %s", error)
                await asyncio.sleep(AWAY_SECONDS)
        raise Unavailable(STOPPING)

    # ---- from the workers

    async def _receive(self, producer: QueryProducer) -> None:
        """Give the answers to the messages that wait for them, until it is cancelled."""

        def find_signature(query_id: bytes) -> bytes | None:
            message = self._messages.get(query_id)
            return None if message is None else message.query.signature

        while True:
            try:
                answer = await producer.receive(find_signature)
                if answer is not None and (message := self._messages.get(answer.id)) is not None:
                    self._take(message, answer)
            except RedisError:
                await asyncio.sleep(AWAY_SECONDS)
            except UnreadableMessage as refusal:
                self._refuse(refusal)
            except Exception:
                logger.exception("Answers to queries are no longer received")
                raise

    def _refuse(self, refusal: UnreadableMessage) -> None:
        """Count an answer that is none, and log the first one of each kind; the query waits for a true one."""
        self._metrics.refusals.labels(refusal.reason).inc()
        if (message := self._messages.get(refusal.query_id)) is not None:
            message.refusal = refusal
        if refusal.reason not in self._refusals:
            self._refusals.add(refusal.reason)
            logger.error(
                "An answer to a query was refused, and further ones will be only counted: %s", refusal
            )

    def _take(self, message: Message, answer: Answer) -> None:
        if isinstance(answer, QueryAccepted):
            now = time.monotonic()
            message.taker, message.is_missed = answer.worker, False
            message.next_look = now + FIRST_LOOK_SECONDS
            self._takers[message.space, answer.worker] = now
        elif not message.answer.done():
            message.answer.set_result(answer)

    async def _wait_for_answer(self, producer: QueryProducer, message: Message) -> EncodedTexts:
        """Return the answer. Raise MessageLost if two checks in a row miss the message, and Unavailable."""
        while not (await asyncio.wait([message.answer], timeout=LOOK_SECONDS))[0]:
            if self._is_stopping():
                raise Unavailable(STOPPING)
            now = time.monotonic()
            if now < message.next_look:
                continue
            try:
                if message.taker is None:
                    is_there = await producer.is_queued(message.space, message.content)
                else:
                    is_there = await producer.is_held(message.taker, message.query.id)
            except RedisError as error:
                logger.debug("Queries are waiting for Redis: %s", error)
                continue
            # One miss proves nothing: the answer, or the notice of who took the message, may be on its way.
            if not is_there and message.is_missed and not message.answer.done():
                if message.refusal is not None:
                    refusal = f"an answer was refused, since {message.refusal}"
                    raise MessageLost(f"{refusal}; restart workers of an earlier release")
                if message.taker is None:
                    raise MessageLost("no worker has taken it, or Redis has lost it")
                raise MessageLost(f"worker {message.taker} had it and is gone, or Redis has lost its answer")
            message.is_missed, message.next_look = not is_there, now + LOOK_SECONDS
        answer = message.answer.result()
        if isinstance(answer, NotEncoded):
            raise MessageLost(answer.reason)
        return answer


def make_query_spec(registry: Registry, spec: EncodingSpec) -> EncodingSpec:
    """Return the spec of queries for a collection's spec: with the model's query prompt, and with truncation.

    The vector of a query is float32, whatever type the collection keeps. With late chunking it is that of passages,
    which is the same for a text that fits.
    """
    long_texts = {FAIL: TRUNCATE, LATE: PASSAGES}.get(spec.long_texts, spec.long_texts)
    prompt = registry.card(spec.model).prompts.get("query", spec.prompt)
    return replace(spec, pooling=spec.model_pooling, prompt=prompt, long_texts=long_texts, vector_type=None)


def find_space(spec: EncodingSpec) -> str:
    return name_space(spec.model, spec.revision, spec.model_pooling)


def count_fitting(spec: EncodingSpec, groups: Sequence[Sequence[bytes]]) -> int:
    """Return how many of these groups of texts, from the first on, fit into one message; at least 1."""
    max_bytes = MAX_BYTES
    if spec.token_dimensions:  # a byte may be a token, whose vector is in the answer
        max_bytes = min(MAX_BYTES, MAX_ANSWER_BYTES // (2 * spec.token_dimensions))
    num_texts = num_bytes = 0
    for number, texts in enumerate(groups):
        num_texts += len(texts)
        num_bytes += sum(map(len, texts))
        if number and (num_texts > MAX_TEXTS or num_bytes > max_bytes):
            return number
    return len(groups)


def cut_parts(spec: EncodingSpec, texts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split the texts into consecutive parts that fit into one message; a part of one text may be larger."""
    while texts:
        size = count_fitting(spec, [[text] for text in texts[:MAX_TEXTS]])
        yield texts[:size]
        texts = texts[size:]


def split_answer(answer: EncodedTexts, sizes: Sequence[int]) -> list[Answered]:
    """Split an answer into those of clients with so many texts each. Raise MessageLost if its size does not match."""
    bounds = [0, *accumulate(sizes)]
    rows = range(bounds[-1])
    try:
        together = Answered(
            answer.read_vectors(len(rows)),
            np.array([answer.failures.get(row) for row in rows], dtype=np.object_),
            np.frombuffer(answer.num_tokens, dtype="<i4").reshape(len(rows)),
            np.array([row in answer.truncated for row in rows]),
        )
    except ValueError as error:
        raise MessageLost("its answer has the wrong length") from error
    return [Answered(*(column[start:end] for column in together)) for start, end in pairwise(bounds)]
