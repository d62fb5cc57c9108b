"""Convert answers of the API to Python objects: events, matches and embeddings. Sends no requests."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from vectormill.batches.endpoints import MAX_INPUTS, EmbeddingsAnswer
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.operations import JobBody
from vectormill.search.operations import MatchBody, SearchAnswer

if TYPE_CHECKING:
    import numpy as np


class EventReader:
    """Reads server-sent events from one stream, whose lines end with a newline, as our API writes them."""

    def __init__(self) -> None:
        self._data: list[bytes] = []

    def read(self, line: bytes) -> JobBody | None:
        """Return the job if this line ends an event that carries one, else None.

        Comment lines, which keep the connection alive, are skipped.
        """
        line = line.removesuffix(b"\r")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        job: JobBody = msgspec.json.decode(data)
        return job


class Matches(list[MatchBody]):
    """The matches of a search, best first, as `{"key", "score", "metadata"}` and the other parts requested.

    Its attributes are the other fields of the answer. `num_rows_read` is the approximate number of rows scanned; it is
    None when an index was used. `next_offset` is the offset of the next page, if there is one. `repeated_because` says
    why an exact search was run again after the index had returned too few matches, `incomplete_because` why there may
    be better ones, and `pages_differ_because` why the page may repeat matches of those before it. `missing_fields` are
    fields of the filter that no sampled row has; they are looked for only if there are no matches. `truncated` says
    that the query's text was cut at the collection's max_tokens.
    """

    num_rows_read: int | None = None
    next_offset: int | None = None
    repeated_because: str | None = None
    incomplete_because: str | None = None
    pages_differ_because: str | None = None
    missing_fields: Sequence[str] = ()
    truncated: bool = False

    @classmethod
    def from_answer(cls, answer: SearchAnswer) -> "Matches":
        matches = cls(answer["data"])
        vars(matches).update({name: value for name, value in answer.items() if name != "data"})
        return matches


def split_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Split texts into lists of at most MAX_INPUTS.

    Raise InvalidOption for a single string, which would otherwise be split into its letters.
    """
    if isinstance(texts, str):
        raise InvalidOption("embed expects a list of texts; for one text use embed([text])[0].")
    left = iter(texts)
    while part := list(islice(left, MAX_INPUTS)):
        yield part


def read_embeddings(answer: EmbeddingsAnswer, dtype: str) -> "np.ndarray[Any, Any]":
    """Return the vectors [inputs, dimensions], which were asked for in this type, in the order of the inputs."""
    import numpy as np

    rows = sorted(answer["data"], key=lambda each: each["index"])
    encoded = b"".join(base64.b64decode(str(each["embedding"])) for each in rows)
    return np.frombuffer(encoded, np.dtype(dtype).newbyteorder("<")).reshape(len(rows), -1)


def join_embeddings(
    parts: Sequence["np.ndarray[Any, Any]"], dimensions: int | None, dtype: str
) -> "np.ndarray[Any, Any]":
    """Concatenate arrays of embeddings into one writable array; without texts the array has no rows."""
    import numpy as np

    return np.concatenate([np.empty((0, parts[0].shape[1] if parts else dimensions or 0), dtype), *parts])
