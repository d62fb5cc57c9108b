"""Lanes: what waits for one spec, and which of it goes into one message. Knows neither Redis nor workers."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from vectormill.broker.query_messages import Encoded, name_space, write_spec
from vectormill.domain.encoding import EncodingSpec

# Of one message. A client's texts are never divided.
MAX_TEXTS: Final = 64
MAX_BYTES: Final = 1 << 20
# For each worker that answers: one message is encoded while the next is tokenized.
MESSAGES_PER_WORKER: Final = 2
# So long a worker counts that has answered.
KNOWN_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Answered:
    """What one client's texts came to. The row of a text in `failures`, which has the reason, is zeros."""

    vectors: npt.NDArray[np.float32]  # [texts, dimensions]
    failures: Mapping[int, str]
    num_tokens: int | None  # None from a worker of an earlier release
    num_truncated: int


@dataclass(slots=True, eq=False)
class Asked:
    """The texts of one client's request."""

    texts: list[bytes]
    deadline: float  # on the event loop's clock
    answer: "asyncio.Future[Answered]"
    is_repeated: bool = False
    traceparent: str | None = None  # where the request is traced

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.texts))

    def forget(self) -> None:
        """Nobody waits any more: what comes now is dropped, an error that came a moment ago too."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()


@dataclass(slots=True, eq=False)
class Lane:
    """What waits for one spec."""

    spec: EncodingSpec
    space: str
    spec_json: bytes
    waiting: "deque[Asked]" = field(default_factory=deque)
    num_sent: int = 0  # messages that are not answered, nor lost
    takers: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: EncodingSpec) -> "Lane":
        return cls(spec, name_space(spec.model, spec.revision, spec.pooling), write_spec(spec))

    def max_sent(self, now: float) -> int:
        if len(self.takers) > 1:
            self.takers = {
                name: seen for name, seen in self.takers.items() if now - seen < KNOWN_SECONDS
            } or dict(list(self.takers.items())[:1])
        return MESSAGES_PER_WORKER * max(1, len(self.takers))

    def next_together(self) -> list[Asked]:
        """The oldest that still have somebody waiting, as many as go into one message."""
        together: list[Asked] = []
        num_texts = num_bytes = 0
        while self.waiting:
            asked = self.waiting[0]
            if asked.answer.done():
                self.waiting.popleft()
                continue
            num_texts += len(asked.texts)
            num_bytes += asked.num_bytes
            if together and (num_texts > MAX_TEXTS or num_bytes > MAX_BYTES):
                break
            together.append(self.waiting.popleft())
        return together


@dataclass(slots=True, eq=False)
class Parcel:
    """One message that was posted."""

    id: bytes
    lane: Lane
    together: list[Asked]
    message: bytes
    next_look: float  # when it is looked after, unless it is answered before
    taker: str | None = None
    is_missed: bool = False  # at the last look
    is_lost: bool = False  # and sent again; its answer is still welcome

    @property
    def is_wanted(self) -> bool:
        return not all(asked.answer.done() for asked in self.together)


def end(together: Sequence[Asked], error: Exception) -> None:
    for asked in together:
        if not asked.answer.done():
            asked.answer.set_exception(error)


def hand_out(together: Sequence[Asked], answer: Encoded) -> str | None:
    """Gives each client what is its own. Or says why the answer cannot be of them."""
    num_texts = sum(len(asked.texts) for asked in together)
    if answer.dimensions <= 0 or len(answer.values) != 4 * num_texts * answer.dimensions:
        return "its answer was of another length"
    vectors = np.frombuffer(answer.values, dtype="<f4").reshape(num_texts, answer.dimensions)
    counts = (
        np.frombuffer(answer.num_tokens, dtype="<i4") if len(answer.num_tokens) == 4 * num_texts else None
    )
    start = 0
    for asked in together:
        end = start + len(asked.texts)
        if not asked.answer.done():
            asked.answer.set_result(
                Answered(
                    vectors[start:end],
                    {row - start: why for row, why in answer.failures.items() if start <= row < end},
                    None if counts is None else int(counts[start:end].sum()),
                    sum(start <= row < end for row in answer.truncated),
                )
            )
        start = end
    return None
