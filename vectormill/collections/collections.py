"""Collections in the database: look up a collection and its generations, and create and change collections.

A generation is a build of a collection. At most one is live, at most one is built alongside it, others are retired. A
writer holds a shared advisory lock on the collection's name until COMMIT; a change of its generations holds it
exclusively. The lock is not on the row, since a row lock would be written to disk with every put.

Searches are in vectormill/search/matches.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, Engine, Row, text

from vectormill.collections.codebooks import check_codes
from vectormill.collections.collection import (
    BUILDING,
    HNSW,
    LIVE,
    RESERVED_WORDS,
    STORED_GENERATION_STATES,
    WRITTEN_GENERATION_STATES,
    CollectionOptions,
    Generation,
    check_kind,
    find_kind,
    require_vectors,
)
from vectormill.collections.generation_tables import create_generation, point_view_at, table_name
from vectormill.db.locks import act_in_short_locks
from vectormill.db.parameters import to_jsonb
from vectormill.db.session import driver_of
from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    InvalidOption,
    SpecMismatch,
    TooManyCollections,
)
from vectormill.domain.vector_type import DEFAULT_IN_COLLECTION

SELECT_GENERATIONS: Final = """
    SELECT generations.id, generations.collection_id, collections.name, generations.spec, generations.state
      FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
"""

# True while the run of a rollback still copies rows and open jobs from this generation.
IS_CARRIED_FROM = """
    EXISTS (SELECT 1 FROM vectormill.runs
             WHERE runs.collection_id = generations.collection_id AND runs.finished_at IS NULL
               AND CAST(runs.options ->> 'carry_from' AS bigint) = generations.id)
"""

SHARE_COLLECTION = text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:name, 7))")

LOCK_COLLECTION = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 7))")

FIND_GENERATION = text(f"{SELECT_GENERATIONS} WHERE generations.id = :generation_id")

LIST_GENERATIONS = text(f"""{SELECT_GENERATIONS}
     WHERE collections.name = :name AND generations.state = ANY(CAST(:states AS text[]))
     ORDER BY generations.id
""")

# Retired generations count too, so that an error can say how a client's fingerprint differs.
FIND_SPEC = text("SELECT spec FROM vectormill.generations WHERE fingerprint = :fingerprint LIMIT 1")


def read_generation(row: Row[Any]) -> Generation:
    """Make a Generation of a row of SELECT_GENERATIONS."""
    spec = EncodingSpec.from_json(row.spec)
    return Generation(row.id, row.collection_id, row.name, spec, table_name(row.id), row.state)


def share_collection(connection: Connection, name: str) -> None:
    """Take the shared lock of a collection: nobody changes its generations until the transaction ends."""
    connection.execute(SHARE_COLLECTION, {"name": name})


def lock_collection(connection: Connection, name: str) -> None:
    """Take the exclusive lock of a collection: nobody else writes to it or changes its generations until the
    transaction ends.
    """
    connection.execute(LOCK_COLLECTION, {"name": name})


ADD_TO_REPORT = text("""
    UPDATE vectormill.generations
       SET report = report || jsonb_build_object(CAST(:name AS text), CAST(:found AS jsonb))
     WHERE id = :generation_id
""")


def add_to_report(
    connection: Connection, generation_id: int, name: str, found: Mapping[str, Any] | None
) -> None:
    """Store an entry of a generation's report: `index`, from what its index was built, or `canary`."""
    values = {"generation_id": generation_id, "name": name, "found": to_jsonb(found)}
    connection.execute(ADD_TO_REPORT, values)


def find_in_state(connection: Connection, collection: str, state: str) -> Generation | None:
    """Return the collection's generation in a state of which there is at most one, LIVE or BUILDING; else None."""
    row = connection.execute(LIST_GENERATIONS, {"name": collection, "states": [state]}).one_or_none()
    return None if row is None else read_generation(row)


def find_building(connection: Connection, collection: str) -> Generation | None:
    """Return the generation that is being built alongside the live one, or None."""
    return find_in_state(connection, collection, BUILDING)


def find_generation_by_id(connection: Connection, generation_id: int) -> Generation | None:
    """Return the generation with this id, in any state, or None."""
    row = connection.execute(FIND_GENERATION, {"generation_id": generation_id}).one_or_none()
    return None if row is None else read_generation(row)


def find_locked(
    connection: Connection, generation_id: int, lock: Callable[[Connection, str], None] = lock_collection
) -> Generation | None:
    """Return the generation as it is under the lock of its collection, in any state, or None."""
    generation = find_generation_by_id(connection, generation_id)
    if generation is None:
        return None
    lock(connection, generation.collection)
    return find_generation_by_id(connection, generation_id)


def find_spec(connection: Connection, fingerprint: str) -> EncodingSpec | None:
    """Return the spec with this fingerprint, or None if no generation has it."""
    spec = connection.execute(FIND_SPEC, {"fingerprint": fingerprint}).scalar_one_or_none()
    return None if spec is None else EncodingSpec.from_json(spec)


def find_written(connection: Connection, generation_id: int) -> Generation:
    """Return a generation to write to, and lock its state until the transaction ends.

    Raise Conflict unless it is live or being built.
    """
    generation = find_locked(connection, generation_id, share_collection)
    if generation is None or generation.state not in WRITTEN_GENERATION_STATES:
        state = "no longer exists" if generation is None else f"is {generation.state}"
        raise Conflict(
            f"Generation {generation_id} {state}, so nothing can be written to it; start the run again."
        )
    return generation


def list_written_generations(
    connection: Connection, collection: str, *, is_deletion: bool = False
) -> list[Generation]:
    """Return the generations, by id, that a put or a deletion writes, and lock them until the transaction ends.

    A put writes the live generation and the one being built. A deletion writes the retired ones too, so that a rollback
    does not bring deleted items back; puts leave them unchanged.
    """
    share_collection(connection, collection)
    states = STORED_GENERATION_STATES if is_deletion else WRITTEN_GENERATION_STATES
    rows = connection.execute(LIST_GENERATIONS, {"name": collection, "states": list(states)})
    return [read_generation(row) for row in rows]


# Postgres parses some 20,000 texts a second into lexemes, and nobody can read or write the table meanwhile.
MOST_REWRITTEN_TEXTS: Final = 100_000

KEEPS_TEXTS = text("SELECT keep_text FROM vectormill.collections WHERE id = :collection_id")

IS_COLLECTION = text("SELECT EXISTS (SELECT 1 FROM vectormill.collections WHERE name = :name)")

COUNT_COLLECTIONS = text("SELECT count(*) FROM vectormill.collections")

IS_RELATION = text("SELECT to_regclass(:schema || '.' || quote_ident(:name)) IS NOT NULL")


def find_generation(connection: Connection, name: str) -> Generation:
    """Return the live generation of a collection. Raise CollectionNotFound."""
    live = find_in_state(connection, name, LIVE)
    if live is None:
        raise CollectionNotFound.named(name)
    return live


def keeps_texts(connection: Connection, collection_id: int) -> bool:
    return bool(connection.execute(KEEPS_TEXTS, {"collection_id": collection_id}).scalar_one())


def fit_spec(generation: Generation, spec: EncodingSpec) -> EncodingSpec:
    """Return the spec under the generation's revision. Raise WrongKind or SpecMismatch for another vector space."""
    check_kind(generation.collection, generation.kind, spec)
    spec = spec.adopt(generation.spec)
    if generation.spec.fingerprint() == spec.fingerprint():
        return spec
    raise SpecMismatch(
        f"Collection {generation.collection!r} contains {generation.kind} of another encoding spec "
        f"({describe_differences(generation.spec, spec)}). "
        "Specs are never mixed: use the same options, or another collection."
    )


def describe_differences(theirs: EncodingSpec, ours: EncodingSpec) -> str:
    """Return the differences of two specs in words, such as `dimensions is 384, not 256`, joined by commas.

    A field may be missing in either spec.
    """
    untold = {"vector_type": DEFAULT_IN_COLLECTION.name, "long_texts": TRUNCATE, "passage_overlap": 0}
    kept, asked = untold | theirs.vector_space(), untold | ours.vector_space()
    return ", ".join(
        f"{name} is {kept.get(name)!r}, not {asked.get(name)!r}"
        for name in kept | asked
        if kept.get(name) != asked.get(name)
    )


def check_collection(
    connection: Connection, name: str, spec: EncodingSpec, max_collections: int
) -> EncodingSpec:
    """Return the spec as `fit_spec` does. Raise the errors of `open_collection`, and TooManyCollections."""
    try:
        return fit_spec(find_generation(connection, name), spec)
    except CollectionNotFound:
        refuse_taken_name(connection, name)
        if connection.execute(COUNT_COLLECTIONS).scalar_one() >= max_collections:
            raise TooManyCollections(
                f"Cannot create collection {name!r}: there are already {max_collections:,} collections, the limit set "
                "by VECTORMILL_MAX_COLLECTIONS. Use an existing collection, or raise the limit."
            ) from None
        return spec


def open_collection(connection: Connection, name: str, spec: EncodingSpec) -> Generation:
    """Return the live generation of a collection; create the collection, its tables and its view if it is new.

    Until the transaction ends this generation stays live and no other is begun: the collection's name is locked, shared
    by all writers. Two first submissions to one name are serialized. Raise WrongKind, SpecMismatch, and Conflict if
    another table or view already has the name.
    """
    if connection.execute(IS_COLLECTION, {"name": name}).scalar_one():
        share_collection(connection, name)
        generation = find_generation(connection, name)  # raises if the collection was deleted at this moment
    else:
        lock_collection(connection, name)
        try:
            generation = find_generation(connection, name)
        except CollectionNotFound:
            return _create_collection(connection, name, spec, CollectionOptions())
    fit_spec(generation, spec)
    return generation


def refuse_taken_name(connection: Connection, name: str) -> None:
    """Raise InvalidOption if the name is a reserved word, and Conflict if another table or view has it."""
    if name.startswith("pg_"):
        raise InvalidOption(
            f"Invalid collection name {name!r}: names that begin with pg_ are reserved for Postgres, which would find "
            "its own table before the collection's view. Choose another name."
        )
    if name in RESERVED_WORDS:
        raise InvalidOption(
            f"Invalid collection name {name!r}: it is a reserved word of SQL, so the collection's view would need "
            f"quotes in every statement. Choose another name, such as {name + '_texts'!r}."
        )
    # If the database role is named as our schema, that schema comes first in its search path, so that our own tables
    # would hide the view.
    is_ours, is_taken = (
        connection.execute(IS_RELATION, {"schema": schema, "name": name}).scalar_one()
        for schema in ("vectormill", "public")
    )
    # This is checked last because the collection's first job may have created it since the caller looked for it.
    if is_ours or (is_taken and not connection.execute(IS_COLLECTION, {"name": name}).scalar_one()):
        raise Conflict(
            f"A table or view named {name!r} already exists and is not a collection; choose another collection name."
        )


def create_collection(
    connection: Connection, name: str, spec: EncodingSpec, options: CollectionOptions, max_collections: int
) -> Generation:
    """Create an empty collection before its first job.

    Raise Conflict if it exists, WrongKind for an HNSW index on scores or records, and the errors of `check_collection`.
    """
    if options.index_policy == HNSW or options.index_options:
        require_vectors(name, find_kind(spec), "An HNSW index needs")
        check_codes(name, spec, options.index_options)
    lock_collection(connection, name)
    if connection.execute(IS_COLLECTION, {"name": name}).scalar_one():
        raise Conflict(f"Collection {name!r} already exists; see `vectormill collections show {name}`.")
    check_collection(connection, name, spec, max_collections)
    check_language(connection, options.language)
    return _create_collection(connection, name, spec, options)


LIST_LANGUAGES = text("""
    SELECT cfgname FROM pg_ts_config WHERE cfgnamespace = CAST('pg_catalog' AS regnamespace) ORDER BY cfgname
""")


def check_language(connection: Connection, language: str) -> None:
    """Raise InvalidOption, which lists the known languages, if Postgres has no such text search configuration."""
    known = list(connection.execute(LIST_LANGUAGES).scalars())
    if language not in known:
        raise InvalidOption(
            f"Unknown text search configuration {language!r}; Postgres has: {', '.join(known)}."
        )


CHANGE_COLLECTION = text("""
    UPDATE vectormill.collections
       SET keep_text = coalesce(CAST(:keep_text AS boolean), keep_text),
           language = coalesce(CAST(:language AS text), language)
     WHERE id = :collection_id
""")


def change_collection(
    engine: Engine, name: str, *, keep_text: bool | None = None, language: str | None = None
) -> None:
    """Change the options of a collection. None leaves an option unchanged.

    `keep_text` applies to items that are written from now on. Another language re-parses every kept text, which
    rewrites the attributes tables in one transaction. Raise CollectionNotFound, InvalidOption, LocksHeld, and Conflict
    if more than MOST_REWRITTEN_TEXTS would be rewritten.
    """

    def change(connection: Connection) -> None:
        lock_collection(connection, name)
        found = connection.execute(FIND_LANGUAGE, {"name": name}).one_or_none()
        if found is None:
            raise CollectionNotFound.named(name)
        if language is not None and language != found.language:
            check_language(connection, language)
            for table in found.tables:
                rewrite_language(connection, name, table, language)
        values = {"collection_id": found.id, "keep_text": keep_text, "language": language}
        connection.execute(CHANGE_COLLECTION, values)

    act_in_short_locks(engine, change, patience_seconds=10)


# The tables with kept texts include those of a generation's first fill.
FIND_LANGUAGE = text("""
    SELECT id, language, ARRAY(
               SELECT CAST(class.relname AS text)
                 FROM vectormill.generations
                 JOIN pg_class AS class ON class.oid IN (
                          to_regclass('vectormill.generation_' || generations.id || '_attributes'),
                          to_regclass('vectormill.generation_' || generations.id || '_fill_attributes'))
                WHERE generations.collection_id = collections.id
                ORDER BY class.relname) AS tables
      FROM vectormill.collections
     WHERE name = :name
""")

COUNT_TEXTS: Final = """
    SELECT count(*) FROM (SELECT 1 FROM {table} WHERE text IS NOT NULL LIMIT %(limit)s) AS kept
"""

# Dropping the column drops its full-text index, which the next index run builds again.
REWRITE_LANGUAGE: Final = """
    ALTER TABLE {table}
        DROP COLUMN search,
        ADD COLUMN search tsvector GENERATED ALWAYS AS (to_tsvector({language}::regconfig, text)) STORED
"""


def rewrite_language(connection: Connection, name: str, table: str, language: str) -> None:
    """Parse every kept text of a table again with another text search configuration. Raise Conflict if they are many.

    The table stays locked for reading and writing until the transaction ends.
    """
    driver, place = driver_of(connection), sql.Identifier("vectormill", table)
    limit = {"limit": MOST_REWRITTEN_TEXTS + 1}
    ((num_texts,),) = driver.execute(sql.SQL(COUNT_TEXTS).format(table=place), limit).fetchall()
    if num_texts > MOST_REWRITTEN_TEXTS:
        raise Conflict(
            f"Collection {name!r} keeps more than {MOST_REWRITTEN_TEXTS:,} texts, and parsing them again for another "
            "language would block all reads and writes meanwhile. Create a new collection in that language and "
            "index the texts into it."
        )
    configuration = sql.Literal(f"pg_catalog.{language}")
    driver.execute(sql.SQL(REWRITE_LANGUAGE).format(table=place, language=configuration))


INSERT_COLLECTION = text("""
    INSERT INTO vectormill.collections (name, keep_text, language, index_policy, index_options)
    VALUES (:name, :keep_text, :language, :index_policy, CAST(:index_options AS jsonb)) RETURNING id
""")


def _create_collection(
    connection: Connection, name: str, spec: EncodingSpec, options: CollectionOptions
) -> Generation:
    refuse_taken_name(connection, name)
    values = {
        "name": name,
        "keep_text": options.keep_text,
        "language": options.language,
        "index_policy": options.index_policy,
        "index_options": to_jsonb(dict(options.index_options)),
    }
    collection_id = connection.execute(INSERT_COLLECTION, values).scalar_one()
    generation = create_generation(connection, collection_id, name, spec, LIVE, {})
    point_view_at(connection, generation)
    return generation
