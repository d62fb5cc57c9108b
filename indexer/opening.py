"""Opening: the reader of a run's source, as its collection has it now."""

from sqlalchemy import text

from indexer.context import RunContext
from indexer.phases.reading import Source
from vectormill.db.runs.runs import refuse_without_texts
from vectormill.domain.source import OWN_TEXTS
from vectormill.domain.source import Source as SourceValues
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace

FIND_SOURCE = text("""
    SELECT sources.kind, sources.options, sources.split
      FROM vectormill.collections LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
     WHERE collections.id = :collection_id
""")


def open_run_source(context: RunContext) -> Source:
    """The texts that the collection keeps, if it has no source. Raises SourceNotFound and InvalidOption."""
    run = context.run
    with context.engine.connect() as connection:
        refuse_without_texts(connection, run.collection)
        row = connection.execute(FIND_SOURCE, {"collection_id": run.collection_id}).one()
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
