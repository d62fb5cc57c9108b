"""A trace collector for tests: a small HTTP server that receives OTLP and keeps the spans."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_server import QuietHandler, serving_http


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]
    links: list[str]


@dataclass
class Collector:
    url: str = ""
    status: int = 200
    num_requests: int = 0
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += [read_span(each) for each in scope.spans]


def read_span(found: Any) -> Span:
    seconds = (found.end_time_unix_nano - found.start_time_unix_nano) / 1e9
    attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found.attributes}
    trace_id, span_id, parent_id = (
        each.hex() for each in (found.trace_id, found.span_id, found.parent_span_id)
    )
    links = [each.span_id.hex() for each in found.links]
    return Span(found.name, trace_id, span_id, parent_id, seconds, attributes, links)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(QuietHandler):
        def answer(self) -> None:
            body = self.read_body()
            collector.num_requests += 1
            if collector.status == 200 and self.path == "/v1/traces":
                is_packed = self.headers.get("content-encoding") == "gzip"
                collector.take(gzip.decompress(body) if is_packed else body)
            self.reply(collector.status)

    with serving_http(Handler) as collector.url:
        yield collector
