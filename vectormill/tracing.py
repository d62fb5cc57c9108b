"""Tracing with OpenTelemetry, from the request to the commit. Without a collector it is not imported.

A job's trace context goes through Postgres and not through Redis: the job's row keeps the `traceparent` of
the request that created it, and a worker that claims a chunk reads it with the claim. So lost, repeated or
older messages do not affect traces. A query has no row, so its message carries the `traceparent`.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from vectormill.domain.errors import ConfigurationError
from vectormill.extras import describe_missing
from vectormill.processes.logs import logging_with

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

Value = str | int | float | bool

# A collector that does not answer blocks only the exporter's thread, for this long a batch.
EXPORT_SECONDS: Final = 5.0
# The number of spans that may wait for export; further ones are dropped.
MAX_WAITING_SPANS: Final = 4096


class Note:
    """The attributes and status of an open span; calls do nothing if no span is recorded."""

    def __init__(self, span: "Span | None" = None) -> None:
        self._span = span

    def tell(self, **attributes: Value) -> None:
        if self._span is not None:
            self._span.set_attributes({f"vectormill.{name}": value for name, value in attributes.items()})

    def rename(self, name: str) -> None:
        if self._span is not None:
            self._span.update_name(name)

    def fail(self, reason: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, reason)


# A stand-in for a span when tracing is off.
NOTHING: Final = nullcontext(Note())
_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None


def begin_tracing(process: str, endpoint: str | None, ratio: float) -> None:
    """Send spans of this process to the collector at `endpoint` from now on; do nothing if it is None.

    `ratio` is the share of traces begun here that is recorded. Raise ConfigurationError if the packages are
    not installed.
    """
    global _tracer, _provider
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigurationError(
            f"{describe_missing(error.name, 'tracing')} Or send no traces to {endpoint}: unset "
            "VECTORMILL_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT."
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_SECONDS)
    _provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(ratio),
        resource=Resource.create({"service.name": f"vectormill-{process}"}),
    )
    _provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING_SPANS))
    _tracer = _provider.get_tracer("vectormill")
    logger.info("Sending traces to %s.", endpoint)


def is_tracing() -> bool:
    return _tracer is not None


def span(
    name: str,
    *,
    kind: str = "internal",
    parent: str | None = None,
    links: Sequence[str] = (),
    began: float | None = None,
    **attributes: Value,
) -> AbstractContextManager[Note]:
    """Return a context manager for a span that is open during its block.

    Its parent is the open span, or the span that the traceparent `parent` names. `links` are the traceparents
    of other spans that it served as well. `began` is a time.time() for a span that began earlier. An error
    that leaves the block is recorded on the span.
    """
    if _tracer is None:
        return NOTHING
    return _recorded(_tracer, name, kind, parent, links, began, attributes)


@contextmanager
def _recorded(
    tracer: "Tracer",
    name: str,
    kind: str,
    parent: str | None,
    links: Sequence[str],
    began: float | None,
    attributes: dict[str, Value],
) -> Iterator[Note]:
    from opentelemetry.trace import Link, SpanKind, get_current_span

    with tracer.start_as_current_span(
        name,
        context=_read_parent(parent),
        kind=SpanKind[kind.upper()],
        links=[Link(get_current_span(_read_parent(link)).get_span_context()) for link in links],
        start_time=None if began is None else int(began * 1e9),
        attributes={f"vectormill.{key}": value for key, value in attributes.items()},
    ) as recorded:
        ids = recorded.get_span_context()
        with logging_with(trace_id=f"{ids.trace_id:032x}", span_id=f"{ids.span_id:016x}"):
            yield Note(recorded)


def note_past(name: str, began: float, ended: float | None = None) -> None:
    """Record a span that has ended, below the open one. Times are those of time.time()."""
    if _tracer is None:
        return
    over = _tracer.start_span(name, start_time=int(began * 1e9))
    over.end(int((time.time() if ended is None else ended) * 1e9))


def current_traceparent() -> str | None:
    """Return the open span as W3C `traceparent`; None if there is none."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


def recorded_traceparent() -> str | None:
    """Return the open span like current_traceparent, but None if the span is not recorded."""
    from_here = current_traceparent()
    return from_here if from_here is not None and int(from_here.rpartition("-")[2], 16) & 1 else None


def _read_parent(traceparent: str | None) -> "Context | None":
    """Return the context that a traceparent names; None, which means the open span, if none is given.

    An invalid traceparent gives an empty context.
    """
    if traceparent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
