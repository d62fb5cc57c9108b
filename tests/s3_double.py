"""A small S3 server for tests: objects in memory, conditions, ranges, lists, and faults on request.

It answers what obstore asks: GET with Range and If-Match, HEAD, PUT with If-None-Match, DeleteObjects and ListObjectsV2
(https://docs.aws.amazon.com/AmazonS3/latest/API/). Signatures are not checked.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.http_server import QuietHandler, serving_http

PAGE: Final = 3  # objects in a page of a list, so that lists have several
START_AFTER = "start-after"  # another name makes it a store that begins every list at its first object

Query = Mapping[str, list[str]]
Headers = dict[str, str]
Reply = tuple[int, bytes, Headers]


@dataclass
class Double:
    """The objects of the server by path, such as "bucket/folder/name", and what goes wrong.

    `fault` is called with method and path of each request before it is carried out, and may return a status to answer
    instead. `after` is called likewise once it has been carried out: so an answer can be lost after a success.
    """

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, datetime] = field(default_factory=dict)
    fault: Callable[[str, str], int | None] = lambda method, path: None
    after: Callable[[str, str], int | None] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, content: bytes) -> None:
        self.objects[path], self.modified[path] = content, datetime.now(UTC)


def tag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class Handler(QuietHandler):
    """Answers the requests of one connection to `double`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one packet, where a client would acknowledge the first of two after 40 ms
    double: Double

    def answer(self) -> None:
        address = urlsplit(self.path)
        path, double = unquote(address.path).lstrip("/"), self.double
        body = self.read_body()
        with double.lock:
            double.requests.append((self.command, path))
            status = double.fault(self.command, path)
            if status is not None:
                self.reply(status, b"<Error><Code>Fault</Code></Error>")
                return
            carry_out = getattr(self, f"_{self.command.lower()}")
            status, content, headers = carry_out(path, parse_qs(address.query, keep_blank_values=True), body)
            status = double.after(self.command, path) or status
        self.reply(status, content, headers)

    def _put(self, path: str, query: Query, body: bytes) -> Reply:
        if self.headers.get("If-None-Match") == "*" and path in self.double.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        self.double.put(path, body)
        return 200, b"", {"ETag": tag_of(body)}

    def _post(self, bucket: str, query: Query, body: bytes) -> Reply:
        """Carry out DeleteObjects."""
        names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", body.decode())]
        for name in names:
            self.double.objects.pop(f"{bucket.rstrip('/')}/{name}", None)
        deleted = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {"Content-Type": "application/xml"}

    def _get(self, path: str, query: Query, body: bytes) -> Reply:
        if "list-type" in query:
            return 200, list_page(self.double, path, query), {"Content-Type": "application/xml"}
        content = self.double.objects.get(path)
        if content is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        if self.headers.get("If-Match") not in (None, tag_of(content)):
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        modified = format_datetime(self.double.modified[path], usegmt=True)
        headers = {"ETag": tag_of(content), "Last-Modified": modified}
        span = self.headers.get("Range")
        if span is None:
            return 200, content, headers
        start, _, end = span.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(end) + 1]
        headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
        return 206, part, headers

    _head = _get


@contextmanager
def s3_double() -> Iterator[Double]:
    """Serve a double on a port of loopback."""
    double = Double()
    handler = type("DoubleHandler", (Handler,), {"double": double})
    with serving_http(handler) as double.url:
        yield double


def list_page(double: Double, bucket: str, query: Query) -> bytes:
    """Return a page of ListObjectsV2; the token of the next one is the last name of this one."""
    start = f"{bucket.rstrip('/')}/"
    prefix = query.get("prefix", [""])[0]
    after = max(query.get(name, [""])[0] for name in ("continuation-token", START_AFTER))
    names = sorted(path.removeprefix(start) for path in double.objects if path.startswith(start + prefix))
    names = [name for name in names if name > after]
    rows = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(double.objects[start + name])}</Size>"
        f"<ETag>{escape(tag_of(double.objects[start + name]))}</ETag>"
        f"<LastModified>{double.modified[start + name].strftime('%Y-%m-%dT%H:%M:%S.000Z')}</LastModified></Contents>"
        for name in names[:PAGE]
    )
    token = (
        f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>"
        if len(names) > PAGE
        else ""
    )
    is_cut = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    return f"<ListBucketResult>{is_cut}{token}{rows}</ListBucketResult>".encode()
