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

    `place` is the highest sequence number of the jobs that wrote it. A faulty row has the opposite of its text's
    vector, as faulty workers of tests compute it; `vector_place` is the sequence number of its writer.
    """

    place: int
    content: Content
    vector_place: int
    is_faulty: bool


def read_rows(connection: Connection, generation_id: int) -> dict[str, KeptRow]:
    """Read all rows by key; fail where a row's text, attributes and vector do not belong together."""
    found = {}
    for row in connection.execute(text(READ_ROWS.format(id=generation_id))):
        assert row.key is not None, "attributes without a row"
        assert row.described_hash is not None, f"{row.key} has no attributes"
        content = row.text.encode()
        assert Item(row.key, content).content_hash() == row.content_hash == row.described_hash
        closeness = _compare(content, row.embedding)
        assert abs(closeness) > 0.99, f"{row.key} has the vector of another text"
        place = max(row.job_seq, row.described_seq)
        content_found = row.text, (row.metadata or "").replace(" ", "")
        found[row.key] = KeptRow(place, content_found, row.job_seq, closeness < 0)
    return found


def _compare(content: bytes, embedding: str) -> float:
    """Return the cosine of a vector, as Postgres prints it, with the vector of `content`.

    It is printed as a list of numbers, or as a string of bits, one for the sign of each number.
    """
    wanted = vector_of(content)
    if embedding.startswith("["):
        return float(np.fromstring(embedding[1:-1], sep=",") @ wanted)
    return float(embedding == "".join("1" if number > 0 else "0" for number in wanted))
