"""A trace collector for tests: a small HTTP server that receives OTLP and keeps the spans."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


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
    return Span(
        found.name,
        found.trace_id.hex(),
        found.span_id.hex(),
        found.parent_span_id.hex(),
        (found.end_time_unix_nano - found.start_time_unix_nano) / 1e9,
        {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found.attributes},
        [each.span_id.hex() for each in found.links],
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.num_requests += 1
            if collector.status == 200 and self.path == "/v1/traces":
                is_packed = self.headers.get("content-encoding") == "gzip"
                collector.take(gzip.decompress(body) if is_packed else body)
            self.send_response(collector.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="collector")
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
