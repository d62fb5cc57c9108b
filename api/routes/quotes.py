"""Quotes over HTTP: what encoding the rows of a source would take. Jobs and runs are quoted by their own dry runs."""

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.intake.submissions import make_wanted_spec
from api.routes.sources import make_source, refusing_failed
from api.serving import serve
from vectormill.jobs.job import NewJob
from vectormill.jobs.operations import QuoteBody
from vectormill.quotes import operations
from vectormill.quotes.operations import QuoteRequest
from vectormill.quotes.quote import make_quote
from vectormill.quotes.sources import sample_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import Source

router = APIRouter(tags=["quotes"])


@serve(router, operations.QUOTE)
async def post_quote(resources: ResourcesDependency, body: QuoteRequest) -> QuoteBody:
    """Read a sample of a source's rows, and return what a job of them would take. Nothing is stored."""
    spec = make_wanted_spec(body.model, body.encoding, resources)
    job = NewJob(spec, body.collection, priority=body.priority)
    with resources.gates.quotes.enter():
        return await run_in_threadpool(quote_source, resources, make_source(body, resources.settings), job)


def quote_source(resources: Resources, source: Source, job: NewJob, *, skips_kept: bool = False) -> QuoteBody:
    """Return the quote of a job of a source's rows. Raise Problem if the source cannot be read as described."""
    engine, settings, registry = resources.engine, resources.settings, resources.registry
    place = SourcePlace(engine, settings, registry, collection=job.collection or "", spec=job.spec)
    with refusing_failed():
        sample = sample_source(source, place)
    with engine.connect() as connection:
        return make_quote(connection, registry.card(job.spec.model), job, sample, skips_kept=skips_kept)
