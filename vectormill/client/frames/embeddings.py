"""Embeddings: texts in parts that the API takes at once, and its answers as arrays of NumPy. Asks nothing."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from vectormill.client.shapes import EmbeddingsAnswer
from vectormill.domain.errors import InvalidOption

if TYPE_CHECKING:
    import numpy as np

# As many as POST /v1/embeddings takes.
MAX_INPUTS: Final = 2_048


def split_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Split texts into lists of at most MAX_INPUTS. Raise InvalidOption for a single text, whose letters would be
    texts.
    """
    if isinstance(texts, str):
        raise InvalidOption("embed expects a list of texts; for one text use embed([text])[0].")
    left = iter(texts)
    while part := list(islice(left, MAX_INPUTS)):
        yield part


def read_embeddings(answer: EmbeddingsAnswer) -> "np.ndarray[Any, Any]":
    """float32 [inputs, dimensions], in the order of the inputs."""
    import numpy as np

    rows = sorted(answer["data"], key=lambda each: each["index"])
    encoded = b"".join(base64.b64decode(str(each["embedding"])) for each in rows)
    return np.frombuffer(encoded, "<f4").reshape(len(rows), -1)


def join_embeddings(
    parts: Sequence["np.ndarray[Any, Any]"], dimensions: int | None
) -> "np.ndarray[Any, Any]":
    """Return one array that may be written to; of no texts it has no rows."""
    import numpy as np

    return np.concatenate(
        [np.empty((0, parts[0].shape[1] if parts else dimensions or 0), np.float32), *parts]
    )
