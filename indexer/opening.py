"""Opening: the reader of a run's source, as its collection has it now."""

from sqlalchemy import text

from indexer.context import RunContext
from indexer.reading import Source
from vectormill.domain.errors import SourceNotFound
from vectormill.domain.source import OWN_TEXTS
from vectormill.domain.source import Source as SourceValues
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace

FIND_SOURCE = text("""
    SELECT sources.kind, sources.options, sources.split, collections.keep_text
      FROM vectormill.collections LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
     WHERE collections.id = :collection_id
""")


def open_run_source(context: RunContext) -> Source:
    """The texts that the collection keeps, if it has no source. Raises SourceNotFound and InvalidOption."""
    run = context.run
    with context.engine.connect() as connection:
        row = connection.execute(FIND_SOURCE, {"collection_id": run.collection_id}).one()
    if row.kind is None and not row.keep_text:
        raise SourceNotFound(
            f"Collection {run.collection!r} has no source, and keeps no texts; set one with `vectormill sources set`."
        )
    source = (
        SourceValues(OWN_TEXTS, {}) if row.kind is None else SourceValues(row.kind, row.options, row.split)
    )
    place = SourcePlace(
        context.engine,
        context.settings,
        context.registry,
        collection=run.collection,
        model=None if run.spec is None else run.spec.model,
        run_id=run.id,
    )
    return open_source(source, place)
