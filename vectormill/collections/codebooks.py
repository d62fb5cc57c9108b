"""Codebooks of residual codes: measured once for a vector space, from its own rows, and never changed.

A collection whose index options have `multi_vector_codes` keeps multi-vectors as codes. Its rows have halves until the
space has a codebook, which an index run measures as soon as there are enough of them. From then on commits write codes,
and the run turns the halves of earlier rows into codes, a few rows in each transaction. Halves are always right too: a
process that knows nothing of codes writes them, and they count wherever they are.

Each row's codes begin with the digest of their codebook.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection, Engine, text

from vectormill.collections.collection import MULTI_VECTOR_CODES, Generation
from vectormill.db.parameters import BYTEA_OID, TEXT_OID, accept_arrays, make_bytes_array
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import MULTI_VECTOR
from vectormill.results.kind import ResultKind
from vectormill.results.representations import ManyRepresentations
from vectormill.results.table import choose_kind
from vectormill.vectors.representations import limit_rows, read_vectors
from vectormill.vectors.residual_codes import Codebook

# With fewer rows a codebook would be learnt by heart, and there is little to save.
LEAST_ROWS: Final = 1000
SAMPLED_ROWS: Final = 10_000
SAMPLE_BYTES: Final = 64 << 20  # of float32

FIND_DIGEST: Final = """
    SELECT codebooks.digest, coalesce(collections.index_options ->> 'multi_vector_codes' = '2', false)
      FROM vectormill.codebooks
      LEFT JOIN vectormill.generations ON generations.id = %(generation_id)s::bigint
      LEFT JOIN vectormill.collections ON collections.id = generations.collection_id
     WHERE codebooks.fingerprint = %(fingerprint)s::text
"""
FIND_CONTENT: Final = "SELECT content FROM vectormill.codebooks WHERE fingerprint = %(fingerprint)s::text"

# If two indexers measure at the same time, the codebook that is committed first applies to everybody.
INSERT_CODEBOOK = text("""
    INSERT INTO vectormill.codebooks (fingerprint, digest, content) VALUES (:fingerprint, :digest, :content)
    ON CONFLICT (fingerprint) DO NOTHING
""")

SAMPLE_VECTORS: Final = """
    SELECT array_send(multi_vector) FROM vectormill.{table} TABLESAMPLE SYSTEM (:share)
     WHERE multi_vector IS NOT NULL LIMIT :limit
"""

# A row that a commit is writing is skipped: the commit writes codes itself, or is that of an older process.
READ_HALVES: Final = """
    SELECT key, array_send(multi_vector) AS vectors FROM vectormill.{table}
     WHERE multi_vector IS NOT NULL AND key > :after ORDER BY key LIMIT :limit FOR UPDATE SKIP LOCKED
"""
WRITE_CODES: Final = """
    UPDATE vectormill.{table} AS live SET multi_vector = NULL, multi_vector_codes = coded.codes
      FROM unnest(%(keys)s::text[], %(codes)s::bytea[]) AS coded (key, codes)
     WHERE live.key = coded.key
"""

# Codebooks by digest. They never change, and a space has one.
_known: dict[bytes, Codebook] = {}
_MOST_KNOWN: Final = 16


def name_token_space(spec: EncodingSpec) -> str:
    """Return the fingerprint of the space of the spec's multi-vectors, whatever other outputs it has."""
    return spec.narrow([MULTI_VECTOR]).fingerprint()


def open_kind(
    driver: psycopg.Connection[Any], spec: EncodingSpec, writing_generation: int | None = None
) -> ResultKind:
    """Return the ResultKind of a spec, which reads codes.

    With `writing_generation` it also writes codes if the collection of this generation wants them.
    """
    if not spec.has_output(MULTI_VECTOR):
        return choose_kind(spec)
    values = {"fingerprint": name_token_space(spec), "generation_id": writing_generation}
    row = driver.execute(FIND_DIGEST, values).fetchone()
    if row is None:
        return choose_kind(spec)
    codebook = _known.get(row[0])
    if codebook is None:
        ((content,),) = driver.execute(FIND_CONTENT, values).fetchall()
        codebook = Codebook.from_bytes(content)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[row[0]] = codebook
    return ManyRepresentations(codebook, writes_codes=row[1])


def check_codes(collection: str, spec: EncodingSpec, options: Mapping[str, Any]) -> None:
    """Raise InvalidOption if codes are wanted of a collection without multi-vectors."""
    if options.get(MULTI_VECTOR_CODES) and not spec.has_output(MULTI_VECTOR):
        raise InvalidOption(
            f"{MULTI_VECTOR_CODES} needs the output multi_vector, but collection {collection!r} has {spec.outputs}."
        )


def find_codebook(connection: Connection, spec: EncodingSpec) -> Codebook | None:
    """Return the codebook of the spec's multi-vectors, or None if it has not been measured."""
    kind = open_kind(driver_of(connection), spec)
    return kind.codebook if isinstance(kind, ManyRepresentations) else None


def sample_tokens(connection: Connection, generation: Generation, num_rows: int) -> npt.NDArray[np.float32]:
    """Return token vectors [n, width] of some of about `num_rows` rows, in random order and bounded memory."""
    width = generation.spec.token_dimensions
    statement = text(SAMPLE_VECTORS.format(table=generation.table_name))
    # Blocks have different numbers of rows, so a few more of them are read.
    values = {"share": min(100.0, 120.0 * SAMPLED_ROWS / max(num_rows, 1)), "limit": SAMPLED_ROWS}
    of_each = -(-SAMPLE_BYTES // (4 * width * min(max(num_rows, 1), SAMPLED_ROWS)))
    numbers = np.random.default_rng(0)
    parts = [np.zeros((0, width), np.float32)]
    rows = connection.execute(statement, values, execution_options={"yield_per": limit_rows(width)})
    for (wire,) in rows:
        tokens = read_vectors(bytes(wire), width)
        chosen = numbers.permutation(len(tokens))[:of_each]
        parts.append(tokens[chosen].astype(np.float32))
    return numbers.permutation(np.concatenate(parts))


def keep_codebook(connection: Connection, spec: EncodingSpec, codebook: Codebook) -> None:
    """Store the codebook of the spec's multi-vectors, unless the space has one already."""
    values = {
        "fingerprint": name_token_space(spec),
        "digest": codebook.digest,
        "content": codebook.to_bytes(),
    }
    connection.execute(INSERT_CODEBOOK, values)


def code_rows(engine: Engine, generation: Generation, codebook: Codebook) -> Iterator[int]:
    """Turn the halves of all rows into codes; yield the number of rows after each transaction."""
    read = text(READ_HALVES.format(table=generation.table_name))
    write = WRITE_CODES.format(table=generation.table_name)
    after, width = "", generation.spec.token_dimensions
    while True:
        with engine.begin() as connection:
            rows = connection.execute(read, {"after": after, "limit": limit_rows(width)}).all()
            if not rows:
                # Postgres counts updated rows a second late, and an index that is built next notes their number.
                connection.execute(text("SELECT pg_stat_force_next_flush()"))
                return
            after = rows[-1].key
            codes = codebook.encode([read_vectors(bytes(row.vectors), width) for row in rows])
            driver = driver_of(connection)
            accept_arrays(driver)
            driver.execute(
                write,
                {
                    "keys": make_bytes_array(TEXT_OID, [row.key.encode() for row in rows]),
                    "codes": make_bytes_array(BYTEA_OID, codes),
                },
            )
        yield len(rows)
