"""QueryExchange: the queries of this API process on their way to workers and back. Belongs to the event loop.

What waits for one spec goes to a worker in one message: at once while workers have few of ours in hand, together with
whatever has come meanwhile when an answer comes. What a dead worker had, or a Redis that lost its content, is sent once
more, each client's texts by themselves, so that no text takes its neighbours with it twice.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from redis.exceptions import OutOfMemoryError, RedisError

from api.metrics.query_metrics import QueryMetrics
from api.queries.lanes import Answered, Asked, Lane, Parcel, end, hand_out
from vectormill.broker.query_messages import (
    PULSE_SECONDS,
    Answer,
    NotEncoded,
    Query,
    Taken,
    UnreadableMessage,
    write_message,
)
from vectormill.broker.query_post import QueryPost
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import QueryLost, Unavailable
from vectormill.tracing import recorded_traceparent, span

# Between two looks at what is not answered yet.
LOOK_SECONDS: Final = 0.1
# Until the first of them, from when it was posted or taken: a pulse, and what it takes on a busy machine.
FIRST_LOOK_SECONDS: Final = PULSE_SECONDS + 0.3
AWAY_SECONDS: Final = 0.1
# So long a query that is sent again may find nobody who listens: when Redis lost its content, workers say at their
# next pulse that they live.
RETURN_SECONDS: Final = PULSE_SECONDS + 0.05
STOPPING: Final = "The API is stopping; send the query again."
FULL: Final = "Redis takes no query, for its memory is full; give it more (maxmemory)."
NO_OTHER: Final = (
    "The worker that had the query is gone, and no other takes queries for its model; send the query again when one "
    "is there."
)

TWICE: Final = "The query was not encoded, at the second attempt either: {reason}. Send it again."

logger = logging.getLogger(__name__)


class NobodyListens(Exception):
    """No live worker takes queries of this space. Nothing was sent."""


class QueryExchange:
    """`ask` from the event loop; `close` at its end. Connects, and starts its two tasks, when it is first asked."""

    def __init__(
        self, redis_url: str, max_text_chars: int, metrics: QueryMetrics, is_stopping: Callable[[], bool]
    ) -> None:
        self._redis_url = redis_url
        self._max_text_chars = max_text_chars
        self._metrics = metrics
        self._is_stopping = is_stopping
        self._lanes: dict[EncodingSpec, Lane] = {}
        self._parcels: dict[bytes, Parcel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._post: QueryPost | None = None
        self._clock_offset: float | None = None  # from the loop's clock to Redis's
        self._has_parcels = asyncio.Event()

    async def ask(self, spec: EncodingSpec, texts: Sequence[bytes], deadline: float) -> Answered:
        """What the texts come to. `deadline` is on the event loop's clock.

        Raises TimeoutError, QueryLost when two workers died with them, and NobodyListens.
        """
        loop = asyncio.get_running_loop()
        if self._post is None:
            self._post = QueryPost(self._redis_url)
            self._start(self._hear(self._post))
            self._start(self._watch(self._post))
        lane = self._lanes.get(spec)
        if lane is None:
            lane = self._lanes[spec] = Lane.of(spec)
        asked = Asked(list(texts), deadline, loop.create_future())
        lane.waiting.append(asked)
        loop.call_soon(self._send_waiting, lane)  # with all that comes in this turn of the loop
        try:
            with (
                self._metrics.time(len(asked.texts)),
                span("query", kind="client", model=spec.model, texts=len(asked.texts)) as note,
            ):
                asked.traceparent = recorded_traceparent()
                async with asyncio.timeout_at(deadline):
                    answered = await asked.answer
                note.tell(repeated=asked.is_repeated)
                return answered
        finally:
            asked.forget()
            self._drop_idle(lane)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._post is not None:
            await self._post.close()

    # ---- to the workers

    def _send_waiting(self, lane: Lane) -> None:
        now = asyncio.get_running_loop().time()
        while lane.waiting and lane.num_sent < lane.max_sent(now):
            together = lane.next_together()
            if together:
                self._send(lane, together)

    def _send(self, lane: Lane, together: list[Asked]) -> None:
        assert self._post is not None
        lane.num_sent += 1
        self._start(self._post_parcel(self._post, lane, together))

    async def _post_parcel(self, post: QueryPost, lane: Lane, together: list[Asked]) -> None:
        """Posts until Redis has taken it, as long as somebody waits for it."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + RETURN_SECONDS if together[0].is_repeated else 0.0
        while not all(asked.answer.done() for asked in together):
            parcel = None
            try:
                if self._clock_offset is None:
                    self._clock_offset = await post.ask_time() - loop.time()
                parcel = self._pack(post, lane, together)
                self._parcels[parcel.id] = parcel  # before its answer can come
                seconds = max(asked.deadline for asked in together) - loop.time()
                if seconds > 0 and await post.post(lane.space, parcel.message, seconds):
                    self._metrics.messages.inc()
                    self._has_parcels.set()
                    return
                if loop.time() < give_up_at:
                    await asyncio.sleep(RETURN_SECONDS / 5)
                else:
                    self._refuse(together)
            except OutOfMemoryError:
                end(together, Unavailable(FULL))
            except RedisError as error:
                self._clock_offset = None  # another Redis may answer next
                logger.debug("A query waits for Redis: %s", error)
                if self._is_stopping():
                    end(together, Unavailable(STOPPING))
                await asyncio.sleep(AWAY_SECONDS)
            if parcel is not None:
                self._parcels.pop(parcel.id, None)
        self._settle(lane)

    def _pack(self, post: QueryPost, lane: Lane, together: list[Asked]) -> Parcel:
        now = asyncio.get_running_loop().time()
        assert self._clock_offset is not None
        query = Query(
            secrets.token_bytes(8),
            post.address,
            int((max(asked.deadline for asked in together) + self._clock_offset) * 1000),
            self._max_text_chars,
            lane.spec_json,
            [text for asked in together for text in asked.texts],
            [asked.traceparent for asked in together if asked.traceparent is not None],
        )
        return Parcel(query.id, lane, together, write_message(query), now + FIRST_LOOK_SECONDS)

    def _refuse(self, together: list[Asked]) -> None:
        """Nobody listens: what was never sent may go another way."""
        for asked in together:
            end([asked], QueryLost(NO_OTHER) if asked.is_repeated else NobodyListens())

    def _settle(self, lane: Lane) -> None:
        """One message less of the lane is at work."""
        lane.num_sent -= 1
        self._send_waiting(lane)
        self._drop_idle(lane)

    def _drop_idle(self, lane: Lane) -> None:
        if not lane.waiting and not lane.num_sent and self._lanes.get(lane.spec) is lane:
            del self._lanes[lane.spec]

    # ---- from the workers

    async def _hear(self, post: QueryPost) -> None:
        while True:
            try:
                answer = await post.hear()
            except RedisError:
                await asyncio.sleep(AWAY_SECONDS)
            except UnreadableMessage as error:
                logger.error("An answer to a query was passed over: %s", error)
            else:
                if answer is not None and (parcel := self._parcels.get(answer.id)) is not None:
                    self._take(parcel, answer)

    def _take(self, parcel: Parcel, answer: Answer) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(answer, Taken):
            parcel.taker, parcel.next_look = answer.worker, now + FIRST_LOOK_SECONDS
            parcel.is_missed = False
            parcel.lane.takers[answer.worker] = now
            return
        del self._parcels[parcel.id]
        reason = answer.reason if isinstance(answer, NotEncoded) else hand_out(parcel.together, answer)
        if parcel.is_lost:
            return  # what it has not answered was sent again
        if reason is None:
            self._settle(parcel.lane)
        else:
            self._lose(parcel, reason)

    async def _watch(self, post: QueryPost) -> None:
        """Looks after what is not answered, now and then."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_parcels.wait()
            await asyncio.sleep(LOOK_SECONDS)
            for parcel in [parcel for parcel in self._parcels.values() if not parcel.is_wanted]:
                del self._parcels[parcel.id]  # its clients have gone, or were answered
                if not parcel.is_lost:
                    self._settle(parcel.lane)
            if self._is_stopping():
                for parcel in self._parcels.values():
                    end(parcel.together, Unavailable(STOPPING))
            now = loop.time()
            overdue = [
                parcel for parcel in self._parcels.values() if now >= parcel.next_look and not parcel.is_lost
            ]
            try:
                if overdue:
                    await self._look_after(post, overdue)
            except RedisError as error:
                logger.debug("Queries wait for Redis: %s", error)
            if not self._parcels:
                self._has_parcels.clear()

    async def _look_after(self, post: QueryPost, overdue: list[Parcel]) -> None:
        now = asyncio.get_running_loop().time()
        workers = {parcel.taker for parcel in overdue if parcel.taker is not None}
        in_hand = await post.look_at_workers(workers)
        for parcel in overdue:
            if parcel.taker is not None:
                is_there = parcel.id in in_hand[parcel.taker]
            else:
                is_there = await post.waits(parcel.lane.space, parcel.message)
            if is_there or not parcel.is_missed:
                # At the first miss its answer, or who took it, may be on the way.
                parcel.is_missed, parcel.next_look = not is_there, now + LOOK_SECONDS
            elif self._parcels.get(parcel.id) is parcel:
                self._lose(parcel, describe_loss(parcel))

    def _lose(self, parcel: Parcel, reason: str) -> None:
        """Each client's texts are sent once more, by themselves."""
        logger.warning("A message of %d queries is not answered: %s", len(parcel.together), reason)
        for asked in parcel.together:
            if asked.answer.done():
                continue
            if asked.is_repeated:
                end([asked], QueryLost(TWICE.format(reason=reason.rstrip("."))))
            else:
                asked.is_repeated = True
                self._metrics.repeats.inc()
                self._send(parcel.lane, [asked])
        parcel.is_lost = True
        self._settle(parcel.lane)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A task of the queries ended: %s", type(error).__name__, exc_info=error)


def describe_loss(parcel: Parcel) -> str:
    if parcel.taker is None:
        return "no worker has taken it, or Redis has lost it"
    return f"worker {parcel.taker} had it and is gone, or Redis has lost its answer"
