"""Opening: the reader of a run's source, as its collection has it now."""

from typing import Final

from indexer.context import RunContext
from indexer.phases.reading import RunSource
from vectormill.collections.collections import find_generation
from vectormill.jobs.twins import add_missing_twins
from vectormill.runs.runs import refuse_without_texts
from vectormill.sources.kinds.own_texts import CarriedTextReader
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import OWN_TEXTS, Source
from vectormill.sources.sources import find_source_of_run

# Behind every place: only jobs that have not ended.
_OPEN_JOBS_ONLY: Final = 2**63 - 1


def open_run_source(context: RunContext) -> RunSource:
    """Open the collection's source, or the texts that it keeps. Raises SourceNotFound and InvalidOption."""
    run = context.run
    if "carry_from" in run.options:
        return open_carried(context)
    with context.engine.connect() as connection:
        refuse_without_texts(connection, run.collection)
        source = find_source_of_run(connection, run.collection_id) or Source(OWN_TEXTS, {})
    place = SourcePlace(
        context.engine,
        context.settings,
        context.registry,
        collection=run.collection,
        spec=run.spec,
        run_id=run.id,
    )
    return open_source(source, place)


def open_carried(context: RunContext) -> CarriedTextReader:
    """Follow a rollback: jobs that still write the retired generation get twins first, then its newer rows are read.

    In this order a job that ends meanwhile is missed by neither. Where texts are missing, ended jobs get twins too.
    """
    run, engine = context.run, context.engine
    retired_id, since_seq = int(run.options["carry_from"]), int(run.options["carry_since"])
    with engine.connect() as connection:
        live = find_generation(connection, run.collection)
    if live.id != retired_id:
        twins_since = since_seq if run.options.get("allow_missing") else _OPEN_JOBS_ONLY
        add_missing_twins(engine, live, retired_id, twins_since)
    place = SourcePlace(
        engine, context.settings, context.registry, collection=run.collection, spec=run.spec, run_id=run.id
    )
    return CarriedTextReader(place, retired_id, since_seq)
