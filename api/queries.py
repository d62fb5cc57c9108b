"""QueryExchange: sends this API process's queries to workers and receives the answers, in the event loop.

Texts of searches are encoded by the same workers as jobs, and before these. Texts for the same spec go to a
worker in one message: at once while the workers have few of our messages, otherwise when the next answer
comes. Texts that a dead worker had, or that Redis has lost, are sent once more, each client's texts in a
message of their own, so that a text that kills workers fails its neighbours at most once.

The texts of a large request go to workers in parts, so that other requests come in between, and no message is
larger than one part. Each part has the full time-out of a search: a request of two thousand texts fails if it
makes no progress, not because it is long.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from fastapi.concurrency import run_in_threadpool
from redis.exceptions import OutOfMemoryError, RedisError
from sqlalchemy import Engine

from api.metrics import QueryMetrics
from vectormill.broker.queries import (
    PULSE_SECONDS,
    Answer,
    EncodedTexts,
    NotEncoded,
    Query,
    QueryProducer,
    Taken,
    UnreadableMessage,
    name_space,
    write_message,
    write_spec,
)
from vectormill.coalescer import Coalescer
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EncodingTimeout, InvalidItem, QueryLost, Unavailable
from vectormill.jobs.item import find_text_failure
from vectormill.jobs.waiting import explain_query_wait
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.tracing import recorded_traceparent, span

# A message to a worker has at most this many texts and bytes. The texts of one part are in one message.
MAX_TEXTS: Final = 64
MAX_BYTES: Final = 1 << 20
# A request has at most this many parts at the workers at once, so that other requests need not wait for all of it.
PARTS_AT_ONCE: Final = 4
# Each worker that answers gets two messages, so that one is encoded while the next is tokenized.
MESSAGES_PER_WORKER: Final = 2
# A worker counts as present for this long after it last took a message.
KNOWN_SECONDS: Final = 10.0
# The time between two checks of a message that is not answered yet.
LOOK_SECONDS: Final = 0.1
# The time from posting or taking a message to the first check: one pulse of a worker, and a margin for a busy
# machine.
FIRST_LOOK_SECONDS: Final = PULSE_SECONDS + 0.3
AWAY_SECONDS: Final = 0.1
# For this long, a repeated query may find no worker: after Redis has lost its content, workers announce
# themselves again at their next pulse.
RETURN_SECONDS: Final = PULSE_SECONDS + 0.05
# The time between two checks for a worker that takes queries, while there is none.
ABSENCE_SECONDS: Final = 0.25
NO_REDIS: Final = (
    "This API knows no Redis, through which the texts of queries go to workers: set VECTORMILL_REDIS_URL to that of "
    "the workers. A search by a vector, or by words alone, needs none."
)
STOPPING: Final = "The API is stopping; send the query again."
FULL: Final = "Redis takes no query, for its memory is full; give it more (maxmemory)."
NO_OTHER: Final = (
    "The worker that had the query is gone, and no other takes queries for its model; send the query again when one "
    "is there."
)
TWICE: Final = "The query was not encoded, at the second attempt either: {reason}. Send it again."

logger = logging.getLogger(__name__)


class MessageLost(Exception):
    """A message got no answer, or an answer that does not fit it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The vectors of one client's texts.

    `failures` maps the index of each failed text to the reason; the row of a failed text is zeros.
    """

    vectors: npt.NDArray[np.float32]  # [texts, dimensions]
    failures: Mapping[int, str]
    num_tokens: int
    num_truncated: int


@dataclass(slots=True, eq=False)
class QueryTexts:
    """Texts of one client's request that are sent in one message."""

    texts: Sequence[bytes]
    deadline: float  # on the event loop's clock
    traceparent: str | None = None  # if the request is traced
    is_repeated: bool = False
    is_wanted: bool = True  # False once the client is answered or has disconnected

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.texts))


@dataclass(slots=True, eq=False)
class Message:
    """A message of queries that was posted to the workers, and the future of its answer."""

    id: bytes
    space: str
    content: bytes
    answer: "asyncio.Future[EncodedTexts | NotEncoded]"
    next_look: float  # when to check on it if it is not answered by then
    taker: str | None = None
    is_missed: bool = False  # at the last check

    def describe_loss(self) -> str:
        if self.taker is None:
            return "no worker has taken it, or Redis has lost it"
        return f"worker {self.taker} had it and is gone, or Redis has lost its answer"


class QueryExchange:
    """A client that has workers encode the texts of queries. It connects to Redis at its first query."""

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
            count=lambda _, waiting: count_together(waiting),
        )
        self._messages: dict[bytes, Message] = {}
        self._takers: dict[str, dict[str, float]] = {}  # by space, when each worker took its last message
        self._producer: QueryProducer | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._clock_offset: float | None = None  # to add to the loop's clock for that of Redis

    async def encode_queries(self, spec: EncodingSpec, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        """Return the vector of each checked query, float32 [dimensions], in the space of `spec`.

        Raise InvalidItem if a text cannot be encoded, EncodingTimeout if no worker answers in time, QueryLost
        if two attempts failed, and Unavailable if the API is stopping or has no Redis.
        """
        different = list(dict.fromkeys(texts))
        if self._registry.is_read(spec.model):
            query_spec = make_query_spec(self._registry, spec)
        else:
            query_spec = await run_in_threadpool(make_query_spec, self._registry, spec)
        answered = await self.answer_all(query_spec, [text.encode() for text in different])
        by_text = dict(zip(different, answered.vectors, strict=True))
        return [by_text[text] for text in texts]

    async def answer_all(self, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
        """Return the results of texts or pairs for the task of `spec`. Raise InvalidItem if any has failed.

        Raise the other errors of encode_queries too.
        """
        answered = await self.answer(spec, texts)
        for reason in answered.failures.values():
            raise InvalidItem(f"The query cannot be encoded: {reason}.")
        return answered

    async def answer(self, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
        """Return the results of at least one text or pair for the task of `spec`, sent to workers in parts.

        Failed texts are in the result's `failures`. Raise the other errors of encode_queries.
        """
        parts = list(cut_parts(texts))
        if len(parts) == 1:
            return await self._answer_part(spec, texts)
        free = asyncio.Semaphore(PARTS_AT_ONCE)

        async def answer_in_turn(part: Sequence[bytes]) -> Answered:
            async with free:
                return await self._answer_part(spec, part)

        tasks = [asyncio.create_task(answer_in_turn(part)) for part in parts]
        try:
            return join_parts(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # once a part has failed or the client has gone, nobody needs the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_part(self, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
        """Return the results of texts that fit in one message.

        While no worker takes queries of this spec, wait.
        """
        if self._settings.redis_url is None:
            raise Unavailable(NO_REDIS)
        timeout = self._settings.search_timeout_seconds
        asked = QueryTexts(texts, asyncio.get_running_loop().time() + timeout)
        try:
            with (
                self._metrics.time(len(texts)),
                span("query", kind="client", model=spec.model, texts=len(texts)) as note,
            ):
                asked.traceparent = recorded_traceparent()
                async with asyncio.timeout_at(asked.deadline):
                    try:
                        return await self._coalescer.ask(spec, asked)
                    except MessageLost:
                        asked.is_repeated = True
                        self._metrics.repeats.inc()
                        (answered,) = await self._send(spec, [asked])
                        return answered
                    finally:
                        note.tell(repeated=asked.is_repeated)
        except MessageLost as loss:
            raise QueryLost(TWICE.format(reason=str(loss).rstrip("."))) from None
        except TimeoutError:
            reason = await run_in_threadpool(self._explain_wait, spec)
            raise EncodingTimeout(f"No worker encoded the query within {timeout:g} s. {reason}") from None
        finally:
            asked.is_wanted = False

    def _explain_wait(self, spec: EncodingSpec) -> str:
        """Return the reason why a query was not answered, in the words used for a waiting job."""
        with self._engine.connect() as connection:
            reason = explain_query_wait(connection, spec)
        return reason or (
            f"Its worker is slow or busy with other queries; see `vectormill status` for {spec.model}."
        )

    async def close(self) -> None:
        await self._coalescer.close()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        if self._producer is not None:
            await self._producer.close()

    def _max_messages(self, space: str) -> int:
        now = asyncio.get_running_loop().time()
        takers = self._takers.get(space, {})
        return MESSAGES_PER_WORKER * max(1, sum(now - seen < KNOWN_SECONDS for seen in takers.values()))

    # ---- to the workers

    async def _send(self, spec: EncodingSpec, together: Sequence[QueryTexts]) -> list[Answered]:
        """Send the texts of these clients in one message, and return each client's results.

        Raise MessageLost, QueryLost if no worker is there for a repeated query, and Unavailable.
        """
        try:
            message = await self._post_message(self._connect(), spec, together)
            try:
                answer = await self._wait_for_answer(self._connect(), message, together)
            finally:
                del self._messages[message.id]
            return split_answer(answer, together)
        except MessageLost as loss:
            if any(asked.is_wanted for asked in together):
                logger.warning("A message of %d queries is not answered: %s", len(together), loss)
            raise

    def _connect(self) -> QueryProducer:
        if self._producer is None:
            assert self._settings.redis_url is not None
            self._producer = QueryProducer(self._settings.redis_url)
            self._hearing = asyncio.create_task(self._hear(self._producer), name="answers to queries")
            self._hearing.add_done_callback(log_failure)
        return self._producer

    async def _post_message(
        self, producer: QueryProducer, spec: EncodingSpec, together: Sequence[QueryTexts]
    ) -> Message:
        """Post the texts as a message, trying again until a worker listens and Redis has accepted it.

        Raise MessageLost if all clients have gone, QueryLost if no worker is there for a repeated query, and
        Unavailable.
        """
        loop = asyncio.get_running_loop()
        is_repeated, began = together[0].is_repeated, loop.time()
        while True:
            self._refuse_unwanted(together)
            message = None
            try:
                if self._clock_offset is None:
                    self._clock_offset = await producer.ask_time() - loop.time()
                deadline = max(asked.deadline for asked in together)
                message = self._pack(producer, spec, together, deadline + self._clock_offset)
                self._messages[message.id] = message  # before its answer can come
                if await producer.post(message.space, message.content, max(deadline - loop.time(), 0.001)):
                    self._metrics.messages.inc()
                    posted, message = message, None
                    return posted
                if is_repeated and loop.time() >= began + RETURN_SECONDS:
                    raise QueryLost(NO_OTHER)
                await asyncio.sleep(RETURN_SECONDS / 5 if is_repeated else ABSENCE_SECONDS)
            except OutOfMemoryError:
                raise Unavailable(FULL) from None
            except RedisError as error:
                self._clock_offset = None  # after a reconnect, it may be another Redis
                logger.debug("A query waits for Redis: %s", error)
                await asyncio.sleep(AWAY_SECONDS)
            finally:
                if message is not None:
                    del self._messages[message.id]

    def _refuse_unwanted(self, together: Sequence[QueryTexts]) -> None:
        """Raise MessageLost if every client has gone, and Unavailable if the API is stopping."""
        if self._is_stopping():
            raise Unavailable(STOPPING)
        if not any(asked.is_wanted for asked in together):
            raise MessageLost("its clients have disconnected")

    def _pack(
        self, producer: QueryProducer, spec: EncodingSpec, together: Sequence[QueryTexts], expires_at: float
    ) -> Message:
        loop = asyncio.get_running_loop()
        query = Query(
            secrets.token_bytes(8),
            producer.address,
            int(expires_at * 1000),
            self._settings.max_text_chars,
            spell_spec(spec),
            [text for asked in together for text in asked.texts],
            [asked.traceparent for asked in together if asked.traceparent is not None],
        )
        next_look = loop.time() + FIRST_LOOK_SECONDS
        return Message(query.id, find_space(spec), write_message(query), loop.create_future(), next_look)

    # ---- from the workers

    async def _hear(self, producer: QueryProducer) -> None:
        while True:
            try:
                answer = await producer.hear()
            except RedisError:
                await asyncio.sleep(AWAY_SECONDS)
                continue
            except UnreadableMessage as error:
                logger.error("An answer to a query was passed over: %s", error)
                continue
            if answer is not None and (message := self._messages.get(answer.id)) is not None:
                self._take(message, answer)

    def _take(self, message: Message, answer: Answer) -> None:
        if isinstance(answer, Taken):
            now = asyncio.get_running_loop().time()
            message.taker, message.is_missed = answer.worker, False
            message.next_look = now + FIRST_LOOK_SECONDS
            self._note_taker(message.space, answer.worker, now)
        elif not message.answer.done():
            message.answer.set_result(answer)

    def _note_taker(self, space: str, worker: str, now: float) -> None:
        """Record that a worker has taken a message.

        Forget workers that have taken none for KNOWN_SECONDS, so that their number stays bounded.
        """
        self._takers.setdefault(space, {})[worker] = now
        for known in list(self._takers):
            takers = self._takers[known]
            self._takers[known] = {name: seen for name, seen in takers.items() if now - seen < KNOWN_SECONDS}
            if not self._takers[known]:
                del self._takers[known]

    async def _wait_for_answer(
        self, producer: QueryProducer, message: Message, together: Sequence[QueryTexts]
    ) -> EncodedTexts:
        """Return the answer to a message.

        Raise MessageLost if two checks in a row did not find the message, the worker could not encode it, or
        all clients have gone; and Unavailable.
        """
        while not (await asyncio.wait([message.answer], timeout=LOOK_SECONDS))[0]:
            self._refuse_unwanted(together)
            now = asyncio.get_running_loop().time()
            if now < message.next_look:
                continue
            try:
                is_there = await self._is_there(producer, message)
            except RedisError as error:
                logger.debug("Queries wait for Redis: %s", error)
                continue
            # At the first miss, the answer or the note of who took the message may still be on its way.
            if not is_there and message.is_missed and not message.answer.done():
                raise MessageLost(message.describe_loss())
            message.is_missed, message.next_look = not is_there, now + LOOK_SECONDS
        answer = message.answer.result()
        if isinstance(answer, NotEncoded):
            raise MessageLost(answer.reason)
        return answer

    async def _is_there(self, producer: QueryProducer, message: Message) -> bool:
        if message.taker is None:
            return await producer.waits(message.space, message.content)
        in_hand = await producer.look_at_workers([message.taker])
        return message.id in in_hand[message.taker]


def check_query(text: str, place: str, settings: Settings, *, what: str = "query") -> None:
    """Raise InvalidItem if a text cannot be encoded.

    The error begins with `place`, the position of the query.
    """
    failure = find_text_failure(text.encode("utf-8", "surrogatepass"), settings.max_text_chars)
    if failure is not None:
        raise InvalidItem(f"{place}The {what} cannot be encoded: {failure.detail}.")


def make_query_spec(registry: Registry, spec: EncodingSpec) -> EncodingSpec:
    """Return the spec for queries to a collection: its own spec, with the model's prompt for queries if any.

    Long queries are truncated instead of refused. A query is a vector of floats, whatever type the collection
    keeps.
    """
    prompts = registry.card(spec.model).prompts
    long_texts = TRUNCATE if spec.long_texts == FAIL else spec.long_texts
    return replace(spec, prompt=prompts.get("query", spec.prompt), long_texts=long_texts, vector_type=None)


def cut_parts(texts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the texts in parts that each fit in one message; a part that is a single text may be larger."""
    start = num_bytes = 0
    for index, text in enumerate(texts):
        if index > start and (index - start == MAX_TEXTS or num_bytes + len(text) > MAX_BYTES):
            yield texts[start:index]
            start, num_bytes = index, 0
        num_bytes += len(text)
    yield texts[start:]


def join_parts(answers: Sequence[Answered]) -> Answered:
    failures: dict[int, str] = {}
    start = 0
    for answer in answers:
        failures |= {start + row: reason for row, reason in answer.failures.items()}
        start += len(answer.vectors)
    return Answered(
        np.concatenate([answer.vectors for answer in answers]),
        failures,
        sum(answer.num_tokens for answer in answers),
        sum(answer.num_truncated for answer in answers),
    )


def log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Answers to queries are not heard any more", exc_info=error)


@functools.lru_cache(maxsize=100)
def find_space(spec: EncodingSpec) -> str:
    return name_space(spec.model, spec.revision, spec.pooling)


@functools.lru_cache(maxsize=100)
def spell_spec(spec: EncodingSpec) -> bytes:
    return write_spec(spec)


def count_together(waiting: Sequence[QueryTexts]) -> int:
    """Return how many of the waiting entries, from the oldest, go into one message; at least 1."""
    num_texts = num_bytes = 0
    for number, asked in enumerate(waiting):
        num_texts += len(asked.texts)
        num_bytes += asked.num_bytes
        if number and (num_texts > MAX_TEXTS or num_bytes > MAX_BYTES):
            return number
    return len(waiting)


def split_answer(answer: EncodedTexts, together: Sequence[QueryTexts]) -> list[Answered]:
    """Return each client's part of an answer.

    Raise MessageLost if the answer does not have the texts' length.
    """
    num_texts = sum(len(asked.texts) for asked in together)
    lengths = (4 * num_texts * answer.dimensions, 4 * num_texts)
    if answer.dimensions <= 0 or (len(answer.values), len(answer.num_tokens)) != lengths:
        raise MessageLost("its answer was of another length")
    vectors = np.frombuffer(answer.values, dtype="<f4").reshape(num_texts, answer.dimensions)
    counts = np.frombuffer(answer.num_tokens, dtype="<i4")
    answered: list[Answered] = []
    start = 0
    for asked in together:
        end = start + len(asked.texts)
        answered.append(
            Answered(
                vectors[start:end],
                {row - start: why for row, why in answer.failures.items() if start <= row < end},
                int(counts[start:end].sum()),
                sum(start <= row < end for row in answer.truncated),
            )
        )
        start = end
    return answered
