"""Collections: look up a collection's live generation, and create and change collections.

Searches are in vectormill/search/matches.py.
"""

from typing import Final

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from vectormill.collections.codebooks import check_codes
from vectormill.collections.collection import (
    HNSW,
    LIVE,
    CollectionOptions,
    Generation,
    check_kind,
    check_new_name,
    find_kind,
    require_vectors,
)
from vectormill.collections.generation_tables import (
    create_generation,
    point_view_at,
)
from vectormill.collections.generations import (
    find_in_state,
    lock_collection,
    share_collection,
)
from vectormill.db.locks import act_in_short_locks
from vectormill.db.parameters import to_jsonb
from vectormill.db.session import driver_of
from vectormill.domain.encoding import FLOAT16, TRUNCATE, EncodingSpec
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    InvalidOption,
    SpecMismatch,
    TooManyCollections,
)

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
        raise CollectionNotFound(
            f"Collection {name!r} does not exist: create it with `vectormill collections create {name}`, or with the "
            "first job that names it."
        )
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
    untold = {"vector_type": FLOAT16, "long_texts": TRUNCATE, "passage_overlap": 0}
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
    check_new_name(name)
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
    connection: Connection, name: str, spec: EncodingSpec, wishes: CollectionOptions, max_collections: int
) -> Generation:
    """Create an empty collection before its first job.

    Raise Conflict if it exists, WrongKind for an HNSW index on scores or records, and the errors of `check_collection`.
    """
    if wishes.index_policy == HNSW or wishes.index_options:
        require_vectors(name, find_kind(spec), "An HNSW index needs")
        check_codes(name, spec, wishes.index_options)
    lock_collection(connection, name)
    if connection.execute(IS_COLLECTION, {"name": name}).scalar_one():
        raise Conflict(f"Collection {name!r} already exists; see `vectormill collections show {name}`.")
    check_collection(connection, name, spec, max_collections)
    check_language(connection, wishes.language)
    return _create_collection(connection, name, spec, wishes)


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
            raise CollectionNotFound(
                f"Collection {name!r} does not exist; see `vectormill collections list`."
            )
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
    connection: Connection, name: str, spec: EncodingSpec, wishes: CollectionOptions
) -> Generation:
    refuse_taken_name(connection, name)
    values = {
        "name": name,
        "keep_text": wishes.keep_text,
        "language": wishes.language,
        "index_policy": wishes.index_policy,
        "index_options": to_jsonb(dict(wishes.index_options)),
    }
    collection_id = connection.execute(INSERT_COLLECTION, values).scalar_one()
    generation = create_generation(connection, collection_id, name, spec, LIVE, {})
    point_view_at(connection, generation)
    return generation
