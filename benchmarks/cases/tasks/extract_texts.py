"""What `extract` is measured on: real texts and five schemas. Knows no model.

A text of a mix carries the number of its schema before it, so that any part of the mix can be read alone.
"""

import hashlib
import json
from typing import Final

from benchmarks.texts import list_docstrings
from vectormill.corpus import take_evenly
from vectormill.domain.tasks.schema import Schema

NUM_CHARS: Final = (20, 2000)
SEPARATOR: Final = "\t"


def _flat(names: str) -> Schema:
    return dict.fromkeys(names.split(", "))


# Of 1, 4, 8, 16 and 40 types; two of them ask again below what they find.
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
    """Docstrings of 20 to 2,000 characters, evenly taken by length, each schema with as many of every length."""
    low, high = NUM_CHARS
    known = dict.fromkeys(item["text"] for item in list_docstrings())
    fitting = sorted((text for text in known if low <= len(text) <= high), key=len)
    texts = take_evenly(fitting, count)
    # Neighbours in length have different schemas; the order then is by chance, as in a file.
    tagged = [f"{number % len(SCHEMAS)}{SEPARATOR}{text}" for number, text in enumerate(texts)]
    return sorted(tagged, key=lambda text: hash_of(text))


def split_tag(tagged: str) -> tuple[int, str]:
    """The number of the schema, and the text."""
    number, _, text = tagged.partition(SEPARATOR)
    return int(number), text


def write_schema(number: int) -> str:
    return json.dumps(SCHEMAS[number])


def hash_of(text: str) -> bytes:
    """The same on every machine, unlike Python's own."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
