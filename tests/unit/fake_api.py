"""A small Vectormill API over real HTTP for the client's and the command line's tests; keeps jobs in memory.

Its vectors are `[characters, 1.0]`, a pair's score falls with its second text's length, and the first two characters of
a text are its one record, of the type "a"; an empty text fails. A job is seen running once and ended from then on.
"""

import gzip
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

PAGE = 2
REPORT = {
    "model": "mini",
    "state": "running",
    "device": {"value": "cpu:0", "reason": "there is no accelerator"},
    "loadings": [
        {"device": "cpu:0", "num_bytes": 90_000_000, "seconds": 1.25},
        {"device": "cpu:1", "num_bytes": 70_000_000, "seconds": 1.5},
    ],
    "placement": {
        "strategy": "replicate",
        "stages": [{"first_layer": 0, "num_layers": 6, "shards": [{"device": "cpu:0"}]}],
    },
    "backend": {"value": "openvino", "reason": "the faster backend on CPUs"},
    "tokens_per_second": 7400.4,
    "padding_waste": 0.021,
    "device_memory_used_bytes": 3 << 29,
    "device_memory_total_bytes": 24 << 30,
    "device_utilisation": None,
    "bound_by": {"value": "run", "reason": "the model: the device was computing in 97% of the time"},
    "precision": {"value": "fp32", "reason": "the device has no bf16 matrix instructions"},
}


# Of collections by name, when they are searched: with an index, and so small that none is needed; others have many.
ROWS_READ = {"indexed": None, "small": 300}
# The fake model cuts texts of more characters.
LONG_CHARS = 100


class FakeApi:
    """State of the service: jobs, what was asked of it, and how it shall misbehave."""

    def __init__(self) -> None:
        self.url = ""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.items: dict[str, list[dict[str, Any]]] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.final_state: str | None = None
        self.waiting_because: str | None = None
        self.load_failure: str | None = None  # of its one worker, for which every job waits then
        self.unprompted: str | None = None
        self.missing_vectors: set[str] = set()
        self.failures_before_success = 0  # answers 503
        self.drops_before_success = 0  # closes the connection after the job is stored
        self.is_export_cut = False
        self.key: str | None = None  # answers 401 to whoever brings another

    def submit(self, body: bytes, parameters: dict[str, str], key: str | None) -> dict[str, Any]:
        if key in self.keys:
            return self.jobs[self.keys[key]]
        items = [json.loads(line) for line in body.splitlines()]
        job_id = f"job-{len(self.jobs) + 1}"
        num_failed = sum(not item["text"].strip() for item in items)
        self.items[job_id] = items
        self.jobs[job_id] = {
            "id": job_id,
            "state": "queued",
            "waiting_because": self.waiting_because,
            "model": parameters.get("model", "mini"),
            "collection": parameters.get("collection"),
            "priority": int(parameters.get("priority", 5)),
            "num_items": len(items),
            "num_done": 0,
            "num_failed": 0,
            "num_chunks": 1,
            "num_retried_chunks": 0,
            "num_tokens": 3 * len(items),
            "truncated_items": sum(is_long(item) for item in items),
            "num_passages": 0,
            "num_reused": 0,
            "created_at": "2026-11-01T02:00:00+00:00",
            "started_at": None,
            "finished_at": None,
            "paused_at": None,
            "items_per_second": 0.0,
            "tokens_per_second": 0.0,
            "eta_seconds": None,
            "padding_waste": 0.125,
            "stages": {"tokenize": {"seconds": 0.5, "share": 0.125}, "run": {"seconds": 3.6, "share": 0.9}},
            "bound_by": {"value": "run", "reason": "the model: the device was computing in 90% of the time"},
            "stage_seconds": {"tokenize": 0.5, "run": 3.6},
            "options": {"dimensions": 2, "max_tokens": 256}
            | {
                name: parameters[name]
                for name in ("long_texts", "passage_overlap", "prompt")
                if name in parameters
            },
            "metadata": json.loads(parameters.get("metadata", "{}")),
            "_final": {
                "state": self.final_state or ("completed_with_errors" if num_failed else "completed"),
                "num_done": len(items) - num_failed,
                "num_failed": num_failed,
                "started_at": "2026-11-01T02:00:01+00:00",
                "finished_at": "2026-11-01T02:00:05+00:00",
            },
        }
        if key is not None:
            self.keys[key] = job_id
        return self.jobs[job_id]

    def poll(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["state"] == "queued" and self.load_failure is not None:
            job["waiting_because"] = f"No worker for mini is ready: {self.load_failure}."
        elif job["state"] == "queued":
            job["state"] = "running"
            job["waiting_because"] = self.waiting_because
        elif job["state"] == "cancelling":
            job["state"] = "cancelling" if job.pop("_is_new", False) else "cancelled"
        elif job["state"] == "running":
            job.update(job["_final"])
        return job

    def worker(self) -> dict[str, Any]:
        worker = {"name": "mini-cpu0@host", "model": "mini", "slots": 6, "report": REPORT}
        if self.load_failure is None:
            return worker
        return worker | {"slots": 0, "report": REPORT | {"state": "dead", "state_reason": self.load_failure}}

    def vectors(self, job_id: str) -> list[dict[str, Any]]:
        return [
            {"key": item["key"], "embedding": [float(len(item["text"])), 1.0]}
            for item in self.items[job_id]
            if item["text"].strip() and item["key"] not in self.missing_vectors
        ]

    def scores(self, job_id: str) -> list[dict[str, Any]]:
        return [
            {"key": item["key"], "score": 1 / len(item["text_pair"]), "label": None, "probabilities": None}
            for item in self.items[job_id]
            if item["key"] not in self.missing_vectors
        ]

    def records(self, job_id: str) -> list[dict[str, Any]]:
        return [
            {"key": item["key"], "output": [[{"type": "a", "span": item["text"][:2], "offset": [0, 2]}]]}
            for item in self.items[job_id]
            if item["key"] not in self.missing_vectors
        ]

    def errors(self, job_id: str) -> list[dict[str, Any]]:
        return [
            {"key": item["key"], "code": "empty_text", "detail": "the text is empty or only white space"}
            for item in self.items[job_id]
            if not item["text"].strip()
        ]


def is_long(item: dict[str, Any]) -> bool:
    return len(item["text"]) > LONG_CHARS


@contextmanager
def serving_fake_api() -> Iterator[FakeApi]:
    """The API on a free port of the loopback, stopped at the end."""
    api = FakeApi()

    class Handler(FakeHandler):
        fake = api

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeApi

    def do_POST(self) -> None:
        path, parameters = self._note("POST")
        try:
            body = self._read_body()
        except (ValueError, ConnectionError):
            self.close_connection = True  # the client broke off in the middle
            return
        match path.strip("/").split("/")[1:]:
            case ["jobs"]:
                if self.fake.failures_before_success:
                    self.fake.failures_before_success -= 1
                    self._problem(503, "Postgres cannot be reached; try again later.")
                    return
                if b"not json" in body:
                    self._problem(400, "Line 2 is not valid JSON.", [{"line": 2, "detail": "not JSON"}])
                    return
                job = self.fake.submit(body, parameters, self.headers["Idempotency-Key"])
                if self.fake.drops_before_success:
                    self.fake.drops_before_success -= 1
                    self.close_connection = True  # the job is there, its answer is lost
                    return
                self._json(job, 202)
            case ["jobs", job_id, "cancel"]:
                self.fake.jobs[job_id]["state"] = "cancelled"
                self._json(self.fake.jobs[job_id])
            case ["jobs", job_id, "pause"]:
                self.fake.jobs[job_id]["state"] = "paused"
                self._json(self.fake.jobs[job_id])
            case ["jobs", job_id, "resume"]:
                self.fake.jobs[job_id]["state"] = "queued"
                self._json(self.fake.jobs[job_id])
            case ["jobs", job_id, "retry"]:
                self.fake.jobs[job_id]["state"] = "queued"
                self._json(self.fake.jobs[job_id], 202)
            case ["collections", name, "search"]:
                if name == "nowhere":
                    self._problem(404, "There is no collection nowhere.")
                    return
                limit = json.loads(body)["limit"]
                keys = [item["key"] for items in self.fake.items.values() for item in items][:limit]
                matches = [{"key": key, "score": 0.5, "metadata": None} for key in keys]
                self._json({"data": matches, "num_rows_read": ROWS_READ.get(name, 12_345)})
            case _:
                self._problem(404, "Not found; see /docs for what there is.")

    def do_DELETE(self) -> None:
        path, _ = self._note("DELETE")
        match path.strip("/").split("/")[1:]:
            case ["jobs", job_id] if job_id not in self.fake.jobs:
                self._problem(404, f"There is no job {job_id}.")
            case ["jobs", job_id] if self.fake.jobs[job_id]["state"] in (
                "queued",
                "running",
                "paused",
                "cancelling",
            ):
                self._problem(409, "The job is queued; cancel it first, then delete it.")
            case ["jobs", job_id]:
                del self.fake.jobs[job_id]
                self._send(204, b"", "application/json")

    def do_GET(self) -> None:
        path, parameters = self._note("GET")
        match path.strip("/").split("/"):
            case ["v1", *_] if self.fake.key and self.headers["Authorization"] != f"Bearer {self.fake.key}":
                self._problem(401, "This API wants a key.")
            case ["v1", "jobs"]:
                found = list(reversed(self.fake.jobs.values()))
                self._page(
                    [job for job in found if parameters.get("state") in (None, job["state"])], parameters
                )
            case ["v1", "jobs", job_id, *_] if job_id not in self.fake.jobs:
                self._problem(404, f"There is no job {job_id}.")
            case ["v1", "jobs", job_id]:
                self._json(self.fake.poll(self.fake.jobs[job_id]))
            case ["v1", "jobs", job_id, "errors"]:
                self._page(self.fake.errors(job_id), parameters)
            case ["v1", "jobs", job_id, "truncated"]:
                cut = [{"key": item["key"]} for item in self.fake.items[job_id] if is_long(item)]
                self._page(cut, parameters)
            case ["v1", "jobs", job_id, "results"]:
                has_pairs = any("text_pair" in item for item in self.fake.items[job_id])
                results = self.fake.scores if has_pairs else self.fake.records
                self._export(results(job_id), parameters)
            case ["v1", "jobs", job_id, "vectors"]:
                self._export(self.fake.vectors(job_id), parameters)
            case ["v1", "models"]:
                mini = {"name": "mini", "task": "embed", "dimension": 2, "max_tokens": 256, "workers": 1}
                self._json({"data": [mini | {"unprompted": self.fake.unprompted}]})
            case ["v1", "workers" | "schedules" as what]:
                self._json({"data": [self.fake.worker()] if what == "workers" else []})
            case ["readyz"]:
                ready = {"status": "ok", "postgres": True, "redis": True, "workers": 1, "scheduler": True}
                self._json(ready)
            case _:
                self._problem(404, "Not found; see /docs for what there is.")

    def _export(self, vectors: list[dict[str, Any]], parameters: dict[str, str]) -> None:
        if "after" in parameters:
            vectors = vectors[[vector["key"] for vector in vectors].index(parameters["after"]) + 1 :]
        if parameters["format"] == "parquet":
            embedding = pa.array([vector["embedding"] for vector in vectors], pa.list_(pa.float32(), 2))
            table = pa.table(
                {"key": pa.array([vector["key"] for vector in vectors], pa.string()), "embedding": embedding}
            )
            buffer = io.BytesIO()
            pq.write_table(table, buffer)
            body = buffer.getvalue()
        else:
            body = b"".join(json.dumps(vector, ensure_ascii=False).encode() + b"\n" for vector in vectors)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.fake.is_export_cut:
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    def _page(self, records: list[dict[str, Any]], parameters: dict[str, str]) -> None:
        start = int(parameters.get("after", 0))
        rest = records[start + PAGE :]
        self._json({"data": records[start : start + PAGE], "next": str(start + PAGE) if rest else None})

    def _note(self, method: str) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        parameters = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.fake.requests.append((method, parts.path, parameters))
        self.fake.headers.append(dict(self.headers.items()))
        return parts.path, parameters

    def _read_body(self) -> bytes:
        if self.headers["Transfer-Encoding"] == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        return gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body

    def _json(self, value: dict[str, Any], status: int = 200) -> None:
        visible = {name: item for name, item in value.items() if not name.startswith("_")}
        self._send(status, json.dumps(visible, default=str).encode(), "application/json")

    def _problem(self, status: int, detail: str, errors: list[Any] | None = None) -> None:
        problem = {"type": "https://example.org/x", "title": "Refused", "status": status, "detail": detail}
        if errors:
            problem["errors"] = errors
        self._send(status, json.dumps(problem).encode(), "application/problem+json")

    def _send(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""
