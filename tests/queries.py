"""Workers for queries in tests: the real listener around an obedient engine, and a lone consumer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from tests.obedient_engine import ObedientEngine
from tests.services import QUERY_KEY
from vectormill.broker.queries import Query, QueryConsumer, Signer, name_space
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.engine.request import EncodeRequest
from worker.queries import QueryEngine, QueryListener

_CARD = Registry({}).card(DEFAULT_MODEL)
SIGNER: Final = Signer(QUERY_KEY)
SPACE: Final = name_space(_CARD.name, _CARD.revision, "+".join(_CARD.pooling))


@contextmanager
def opening_consumer(redis_url: str) -> Iterator[tuple[QueryConsumer, str]]:
    """Yield the consumer of a worker that does nothing by itself, and the worker's name."""
    worker = f"worker-{uuid4().hex[:6]}"
    consumer = QueryConsumer(redis_url, [SPACE], worker, SIGNER)
    try:
        yield consumer, worker
    finally:
        consumer.close()


@contextmanager
def listening(
    redis_url: str,
    before: Callable[[EncodeRequest], object] = lambda request: None,
    *spaces: str,
    engine: QueryEngine | None = None,
) -> Iterator[QueryListener]:
    """Answer queries as a worker while the block runs; `before` is called with each request, and may raise.

    With `engine` that engine encodes the queries, and `before` is not called.
    """
    worker = f"worker-{uuid4().hex[:6]}"
    listener = QueryListener(
        QueryConsumer(redis_url, spaces or [SPACE], worker, SIGNER), engine or ObedientEngine(before), worker
    )
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


def take_one(consumer: QueryConsumer) -> Query:
    query = consumer.take()
    assert query is not None
    return query
