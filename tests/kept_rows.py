"""Read the rows of a generation for tests, and compare each row with the vector of its text.

The vectors are those of tests/protocol.py. This module knows neither who wrote a row nor which rows should
exist.
"""

from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, text

from tests.protocol import vector_of
from vectormill.jobs.item import Item

# A text and its metadata as JSON.
Content = tuple[str, str]

READ_ROWS = """
    SELECT live.key, live.content_hash, live.embedding::text AS embedding, live.job_seq, kept.text,
           kept.metadata::text AS metadata, kept.content_hash AS described_hash, kept.job_seq AS described_seq
      FROM vectormill.generation_{id} AS live
      FULL JOIN vectormill.generation_{id}_attributes AS kept ON kept.key = live.key
"""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row of a generation whose collection keeps texts.

    `place` is the highest sequence number of the jobs that wrote it.
    """

    place: int
    content: Content


def read_rows(connection: Connection, generation_id: int) -> dict[str, KeptRow]:
    """Read all rows by key; fail where a row's text, attributes and vector do not belong together."""
    found = {}
    for row in connection.execute(text(READ_ROWS.format(id=generation_id))):
        assert row.key is not None, "attributes without a row"
        assert row.described_hash is not None, f"{row.key} has no attributes"
        content = row.text.encode()
        assert Item(row.key, content).content_hash() == row.content_hash == row.described_hash
        assert _is_vector_of(content, row.embedding), f"{row.key} has the vector of another text"
        place = max(row.job_seq, row.described_seq)
        found[row.key] = KeptRow(place, (row.text, (row.metadata or "").replace(" ", "")))
    return found


def _is_vector_of(content: bytes, embedding: str) -> bool:
    """Return whether a vector, as Postgres prints it, is the vector of `content`.

    It is printed as a list of numbers, or as a string of bits, one for the sign of each number.
    """
    wanted = vector_of(content)
    if embedding.startswith("["):
        return bool(np.fromstring(embedding[1:-1], sep=",") @ wanted > 0.99)
    return embedding == "".join("1" if number > 0 else "0" for number in wanted)
