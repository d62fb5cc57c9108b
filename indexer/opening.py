"""Opening: the reader of a run's source, as its collection has it now."""

from indexer.context import RunContext
from indexer.phases.reading import Source
from vectormill.db.runs.runs import refuse_without_texts
from vectormill.db.runs.sources import find_source_of_run
from vectormill.domain.source import OWN_TEXTS
from vectormill.domain.source import Source as SourceValues
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace


def open_run_source(context: RunContext) -> Source:
    """The texts that the collection keeps, if it has no source. Raises SourceNotFound and InvalidOption."""
    run = context.run
    with context.engine.connect() as connection:
        refuse_without_texts(connection, run.collection)
        source = find_source_of_run(connection, run.collection_id) or SourceValues(OWN_TEXTS, {})
    place = SourcePlace(
        context.engine,
        context.settings,
        context.registry,
        collection=run.collection,
        spec=run.spec,
        run_id=run.id,
    )
    return open_source(source, place)
