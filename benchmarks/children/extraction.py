"""Provide the input of the benchmark `extract`: five schemas, and texts that name one by its number."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.texts import hash_of, list_docstrings
from vectormill.corpus import take_evenly
from vectormill.domain.schema import Schema

NUM_CHARS: Final = (20, 2000)
SEPARATOR: Final = "\t"
DIGEST_BYTES: Final = 16


def _flat(names: str) -> Schema:
    return dict.fromkeys(names.split(", "))


# Schemas of 1, 4, 8, 16 and 40 types. Two are nested: they ask again about each span that was found.
SCHEMAS: Final[tuple[Schema, ...]] = (
    _flat("function"),
    _flat("class, function, exception, module"),
    {
        "function": _flat("parameter, return value"),
        "class": _flat("method, attribute"),
        **_flat("exception, module"),
    },
    {
        "class": _flat("method, attribute, base class, instance"),
        "function": {"parameter": _flat("default, type"), "return value": None},
        **_flat("exception, module, package, version, file, operating system, encoding, protocol"),
    },
    _flat(
        "address, algorithm, argument, attribute, buffer, byte order, callback, character, class, command, constant, "
        "container, context manager, date, decorator, default value, directory, encoding, environment variable, "
        "exception, expression, file format, function, generator, host name, iterator, library, lock, method, module, "
        "operating system, parser, path, platform, process, protocol, regular expression, return value, socket, thread"
    ),
)


def list_tagged_texts(count: int) -> list[str]:
    """Return docstrings of 20 to 2,000 characters, tagged with the number of a schema.

    They are spread evenly over the lengths, and every schema gets as many of each length.
    """
    low, high = NUM_CHARS
    known = dict.fromkeys(item["text"] for item in list_docstrings())
    fitting = sorted((text for text in known if low <= len(text) <= high), key=len)
    texts = take_evenly(fitting, count)
    # Neighbours in length get different schemas; then the order is random, as in a file.
    tagged = [f"{number % len(SCHEMAS)}{SEPARATOR}{text}" for number, text in enumerate(texts)]
    return sorted(tagged, key=lambda text: hash_of(text))


def split_tag(tagged: str) -> tuple[int, str]:
    """Return the number of the schema and the text of a tagged text."""
    number, _, text = tagged.partition(SEPARATOR)
    return int(number), text


def digest_records(records: Sequence[Any]) -> NDArray[np.float32]:
    """Return the digest of each text's records as a row [n, DIGEST_BYTES]; equal rows mean equal records."""
    digests = [
        hashlib.blake2b(json.dumps(each, ensure_ascii=False).encode(), digest_size=DIGEST_BYTES).digest()
        for each in records
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES).astype(np.float32)
