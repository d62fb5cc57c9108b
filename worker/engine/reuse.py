"""VectorReuse: which sequences need not be computed, because their vector is known or on its way. Knows no texts.

A sequence is known by a digest of its token ids, so two texts that a tokenizer makes equal are one sequence. Vectors
are those of one model, as the encoder gives them: not cut, not normalized. Taking one over changes nothing, because no
vector depends on its batch. Threads meet here.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts

# 16 bytes: among 10^12 different sequences the chance of one collision is 1 to 10^15.
DIGEST_BYTES: Final = 16
# What Python keeps for a vector besides its values: the array's header, the digest, the dictionary's entry.
ENTRY_BYTES: Final = 300

Vector = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Flight:
    """The sequences that one request computes: digest to the row of its vector. Others wait until it has landed."""

    rows: dict[bytes, int] = field(default_factory=dict)
    vectors: dict[bytes, Vector] = field(default_factory=dict)
    landed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Division:
    """A request's sequences by where their vectors come from; the keys are rows of the request."""

    known: Mapping[int, Vector]
    flight: Flight  # to be computed by this very request, which must let it land
    awaited: Mapping[int, Flight]  # computed in a flight, perhaps its own


class VectorReuse:
    """Keeps the vectors used last, up to so many bytes, and the flights under way. 0 bytes: reuses nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._recent: OrderedDict[bytes, Vector] = OrderedDict()  # the one used last is the last
        self._num_bytes = 0
        self._flights: dict[bytes, Flight] = {}

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def divide(self, digests: Mapping[int, bytes], *, may_wait: bool) -> Division:
        """Says for every row what is to be done with it, and starts a flight for what must be computed.

        Without `may_wait` nothing is awaited of others: who is in a hurry computes what a large chunk would compute
        at some time. Let the flight land whatever happens, or others wait for ever.
        """
        known: dict[int, Vector] = {}
        awaited: dict[int, Flight] = {}
        flight = Flight()
        with self._lock:
            for row, digest in digests.items():
                vector = self._recent.get(digest)
                if vector is not None:
                    self._recent.move_to_end(digest)
                    known[row] = vector
                elif digest in flight.rows:
                    awaited[row] = flight
                elif may_wait and digest in self._flights:
                    awaited[row] = self._flights[digest]
                else:
                    flight.rows[digest] = row
                    if self._max_bytes:
                        self._flights.setdefault(digest, flight)
        return Division(known, flight, awaited)

    def land(self, flight: Flight, vectors: Vector, sound: Iterable[int]) -> None:
        """Ends a flight. Of its rows in `vectors` [n, dim] those in `sound` are shared; who awaits another of them
        computes it itself, so that a failure stays with the request in which it happened.
        """
        is_sound = set(sound)
        found = {digest: vectors[row].copy() for digest, row in flight.rows.items() if row in is_sound}
        flight.vectors.update(found)
        with self._lock:
            for digest in flight.rows:
                if self._flights.get(digest) is flight:
                    del self._flights[digest]
            for digest, vector in found.items():
                self._keep(digest, vector)
        flight.landed.set()

    def _keep(self, digest: bytes, vector: Vector) -> None:
        cost = vector.nbytes + ENTRY_BYTES
        if digest in self._recent or cost > self._max_bytes:
            return
        self._recent[digest] = vector
        self._num_bytes += cost
        while self._num_bytes > self._max_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._num_bytes -= oldest.nbytes + ENTRY_BYTES


def digest_sequences(texts: TokenizedTexts, rows: Iterable[int], prompt_length: int) -> dict[int, bytes]:
    """The digest of each of these rows: of its token ids, and of how many of them are not pooled over."""
    start_of_all = blake2b(prompt_length.to_bytes(4, "little"), digest_size=DIGEST_BYTES)
    # Plain bytes and integers: slicing an array a row would cost more than hashing it.
    ids = texts.inputs[INPUT_IDS]
    content, size = ids.values.tobytes(), ids.values.itemsize
    offsets = ids.offsets.tolist()
    digests = {}
    for row in rows:
        state = start_of_all.copy()
        state.update(content[size * offsets[row] : size * offsets[row + 1]])
        digests[row] = state.digest()
    return digests
