"""ChunkCutter: cuts the items of a job into chunks, by estimated tokens, items and bytes. Knows no database."""

from dataclasses import dataclass

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import LARGEST_CHUNK_TOKENS, TokenEstimate, choose_chunk_tokens, encode_payload
from vectormill.jobs.item import Items
from vectormill.settings import Settings


@dataclass(frozen=True, slots=True)
class CutChunk:
    """A chunk that is to be written."""

    seq: int
    first_item: int
    num_items: int
    estimated_tokens: int
    items: bytes
    places: list[int] | None


class ChunkCutter:
    """A cutter of one job, whose chunks grow with it: at `next_chunk_tokens` one is closed."""

    def __init__(self, spec: EncodingSpec, settings: Settings) -> None:
        self.num_items = 0
        self.num_chunks = 0
        self.next_chunk_tokens = choose_chunk_tokens(0)
        self._num_tokens = 0
        self._estimate = TokenEstimate(spec)
        self._max_items, self._max_bytes = settings.chunk_max_items, settings.chunk_max_bytes
        self._begin()

    def _begin(self) -> None:
        self.keys: list[str] = []
        self._texts: list[bytes] = []
        self._metadata: list[bytes] = []
        self._places: list[int] = []
        self._item_bytes = 0
        self._item_tokens = 0

    def go_on(self, num_items: int, num_chunks: int, num_tokens: int) -> None:
        """Cut the next chunk behind those that an earlier writer of the job has written."""
        self.num_items, self.num_chunks, self._num_tokens = num_items, num_chunks, num_tokens
        self.next_chunk_tokens = choose_chunk_tokens(num_tokens)

    def add(self, key: str, text: bytes, metadata: bytes, place: int | None, num_bytes: int) -> bool:
        """Add an item of so many bytes. Return whether the items since the last cut fill a chunk."""
        self.num_items += 1
        self.keys.append(key)
        self._texts.append(text)
        self._metadata.append(metadata)
        if place is not None:
            self._places.append(place)
        self._item_bytes += num_bytes
        self._item_tokens += self._estimate.of(text)
        return (
            self._item_tokens >= self.next_chunk_tokens
            or len(self._texts) >= self._max_items
            or self._item_bytes >= self._max_bytes
        )

    @property
    def filled(self) -> float:
        """Return the items since the last cut as a share of the largest chunk in tokens, items or bytes."""
        return max(
            self._item_tokens / LARGEST_CHUNK_TOKENS,
            len(self._texts) / self._max_items,
            self._item_bytes / self._max_bytes,
        )

    def cut(self) -> CutChunk:
        """Return the items since the last cut as a chunk."""
        payload = encode_payload(Items(self.keys, self._texts, self._metadata))
        chunk = self._number(len(self.keys), self._item_tokens, payload, self._places or None)
        self._begin()
        return chunk

    def cut_reference(self, num_items: int, num_tokens: int, payload: bytes) -> CutChunk:
        """Return a chunk whose items stay in their object."""
        self.num_items += num_items
        return self._number(num_items, num_tokens, payload, None)

    def _number(self, num_items: int, num_tokens: int, payload: bytes, places: list[int] | None) -> CutChunk:
        first_item = self.num_items - num_items
        chunk = CutChunk(self.num_chunks, first_item, num_items, num_tokens, payload, places)
        self.num_chunks += 1
        self._num_tokens += num_tokens
        self.next_chunk_tokens = choose_chunk_tokens(self._num_tokens)
        return chunk
