"""Coalescer: combine questions that callers ask at the same time into one call, and answer each caller.

Questions wait under a key, and only questions with the same key are combined. A coalescer belongs to one
event loop. Its creator passes the function that answers many questions at once.

| question                    | key                 | combined into           | calls at once           |
| --------------------------- | ------------------- | ----------------------- | ----------------------- |
| query: QueryExchange        | spec                | a message of 64 texts   | 2 messages for a worker |
| search: SearchPool          | generation and form | a statement of 20 ms    | 3 statements            |
| put: Puts                   | collection          | a job of one chunk      | 1 job of a collection   |
| API keys: Keyring           | none                | all waiting questions   | 1 read                  |
"""

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from vectormill.domain.errors import LimitReached

KeyT = TypeVar("KeyT", bound=Hashable)
Question = TypeVar("Question")
Answer = TypeVar("Answer")

NO_ROOM: Final = (
    "This API process already has {num:,} requests of this kind waiting, the maximum; try again in a moment."
)


class CallNotStarted(TimeoutError):
    """The call for the question did not begin before the longest waiting time had passed."""


@dataclass(slots=True, eq=False)
class Caller(Generic[Question, Answer]):
    """The question of one caller, and the future of its answer."""

    question: Question
    answer: "asyncio.Future[Answer]"

    def refuse(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def forget(self) -> None:
        """Cancel the future, because the caller has gone.

        If the future has an exception already, retrieve it, since asyncio would otherwise log it.
        """
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()


class Coalescer(Generic[KeyT, Question, Answer]):
    """Combines waiting questions with the same key into one call of `carry_out`, which answers each of them.

    If a caller is cancelled, its waiting question is dropped. A call in progress continues for the others, and also
    without any unless `abandons`.

    Args:
        carry_out: answers the questions of one key, in their order. An error is raised in all their callers.
        max_waiting: the largest number of waiting questions; one more raises LimitReached.
        max_running: the largest number of calls of `carry_out` at once, for all keys together.
        max_running_of: returns the largest number of calls at once for one key; evaluated before each call.
        count: returns how many questions of a key go into its next call, from the oldest on; at least 1.
        choose_pause: returns the seconds to wait for further questions before the next call.
        is_of_one: returns whether a single question may have caused an error; then each is tried alone.
        abandons: whether a call is cancelled once all its callers have gone.
    """

    def __init__(
        self,
        carry_out: Callable[[KeyT, Sequence[Question]], Awaitable[Sequence[Answer]]],
        *,
        max_waiting: int,
        max_running: float = float("inf"),
        max_running_of: Callable[[KeyT], float] = lambda _: float("inf"),
        count: Callable[[KeyT, Sequence[Question]], int] = lambda _, questions: len(questions),
        choose_pause: Callable[[], float] = lambda: 0.0,
        is_of_one: Callable[[Exception], bool] = lambda _: False,
        abandons: bool = False,
    ) -> None:
        self._carry_out = carry_out
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._max_running_of = max_running_of
        self._count = count
        self._choose_pause = choose_pause
        self._is_of_one = is_of_one
        self._abandons = abandons
        self._numbers = itertools.count()
        self._queues: dict[
            KeyT, dict[int, Caller[Question, Answer]]
        ] = {}  # by key, then by number, oldest first
        self._running: Counter[KeyT] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.num_waiting = 0

    @property
    def num_running(self) -> int:
        """Return the number of calls of `carry_out` in progress."""
        return len(self._tasks)

    async def ask(self, key: KeyT, question: Question, max_wait_seconds: float | None = None) -> Answer:
        """Return the answer to a question.

        Raise what `carry_out` raises, LimitReached if too many questions wait, and CallNotStarted if the call of the
        question does not begin within `max_wait_seconds`.
        """
        if self.num_waiting >= self._max_waiting:
            raise LimitReached(NO_ROOM.format(num=self.num_waiting))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        number, waiting = next(self._numbers), Caller(question, answer)
        self._queues.setdefault(key, {})[number] = waiting
        self.num_waiting += 1
        self._wake()
        patience = (
            None
            if max_wait_seconds is None
            else loop.call_later(max_wait_seconds, self._give_up, key, number)
        )
        try:
            return await answer
        finally:
            if patience is not None:
                patience.cancel()
            self._remove(key, number)
            waiting.forget()

    async def close(self) -> None:
        """Wait until all calls in progress have ended. Call after the last `ask`."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _give_up(self, key: KeyT, number: int) -> None:
        if (waiting := self._remove(key, number)) is not None:
            waiting.refuse(CallNotStarted())

    def _remove(self, key: KeyT, number: int) -> Caller[Question, Answer] | None:
        """Remove a question from its queue and return it. Return None if its call has begun."""
        queue = self._queues.get(key, {})
        waiting = queue.pop(number, None)
        if waiting is not None:
            self.num_waiting -= 1
            if not queue:
                del self._queues[key]
        return waiting

    def _wake(self) -> None:
        """Schedule the next calls, after this turn of the event loop or after the pause."""
        if self._timer is None and self._queues:
            self._timer = asyncio.get_running_loop().call_later(self._choose_pause(), self._begin)

    def _begin(self) -> None:
        """Begin as many calls as the limits allow; the key with the oldest question comes first."""
        self._timer = None
        while self.num_running < self._max_running:
            ready = [key for key in self._queues if self._running[key] < self._max_running_of(key)]
            if not ready:
                return
            key = min(ready, key=lambda key: next(iter(self._queues[key])))
            together = self._take(key)
            task = asyncio.get_running_loop().create_task(self._answer(key, together))
            self._running[key] += 1
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._end, key, together))
            if self._abandons:
                for waiting in together:
                    waiting.answer.add_done_callback(functools.partial(self._abandon, together, task))

    def _abandon(
        self,
        together: Sequence[Caller[Question, Answer]],
        task: "asyncio.Task[None]",
        _: "asyncio.Future[Answer]",
    ) -> None:
        if all(waiting.answer.done() for waiting in together):
            task.cancel()

    def _take(self, key: KeyT) -> list[Caller[Question, Answer]]:
        queue = self._queues[key]
        num_together = self._count(key, [waiting.question for waiting in queue.values()])
        taken = [self._remove(key, number) for number in list(queue)[:num_together]]
        return [waiting for waiting in taken if waiting is not None]

    def _end(
        self, key: KeyT, together: Sequence[Caller[Question, Answer]], task: "asyncio.Task[None]"
    ) -> None:
        for waiting in together:
            waiting.answer.cancel()  # has an effect only if the task was cancelled
        self._tasks.discard(task)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._wake()

    async def _answer(self, key: KeyT, together: Sequence[Caller[Question, Answer]]) -> None:
        try:
            answers = await self._carry_out(key, [waiting.question for waiting in together])
            for waiting, answer in zip(together, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except Exception as error:  # noqa: BLE001 - it is raised in each of the callers
            if len(together) > 1 and self._is_of_one(error):
                for waiting in together:
                    if not waiting.answer.done():
                        await self._answer(key, [waiting])
            else:
                for waiting in together:
                    waiting.refuse(error)
