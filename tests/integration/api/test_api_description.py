"""The API keeps what its OpenAPI document says, for requests that schemathesis makes up from it.

Derandomised: what a run tries depends on nothing but the document.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, SerializationContext
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from tests.api_server import ITEMS, JSON, api_client, encode_waiting, submit
from tests.schedules import add_source, make_schedule
from tests.services import connected_engine, migrated_database
from vectormill.db.session import make_engine
from vectormill.operation import CONFIRMATION
from vectormill.settings import Settings

# Of right requests for each operation, and of wrong ones: 0.6 s of processor time for as many.
NUM_EXAMPLES: Final = 15
# Whatever takes so long hangs: a search whose text nobody encodes is given up after a tenth of a second.
PATIENCE_SECONDS: Final = 30
# What no schema can say: the limits of a model, what the database holds, and what is a text.
REFUSED_FOR_ITS_MEANING: Final = frozenset(
    {
        "unknown-model",
        "invalid-option",
        "invalid-item",
        "confirmation-missing",
        "duplicate-key",
        "empty-job",
        "idempotency-mismatch",
        "source-failed",
    }
)
INT_GOT_FLOAT: Final = re.compile(rb"Expected `int\b[^`]*`, got `float`")
# No worker runs here; on a busy machine any search may take longer than the tenth of a second; and a made-up URL of an
# object may name a store that nobody has.
UNAVAILABLE: Final = frozenset({"encoding-timeout", "search-timeout", "storage-unavailable"})
NOT_THERE_OR_NOT_NOW: Final = (401, 403, 404, 409)


def describe() -> dict[str, Any]:
    app = create_app(
        Settings(), make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    )
    document: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    return document


DOCUMENT: Final = describe()
OPERATIONS: Final = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if isinstance(found, Ok)
}


@schemathesis.serializer("application/x-ndjson")
def write_line(context: SerializationContext, value: Any) -> bytes | None:
    """An item as the only line of a stream."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@dataclass(frozen=True)
class Service:
    """A running API with a collection `docs` and an ended job."""

    url: str
    job_id: str
    file_id: str
    batch_id: str

    def submit_another(self) -> str:
        """A job that may be deleted; it has ended."""
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            job_id: str = submit(client, ITEMS)["id"]
            client.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
        return job_id


@pytest.fixture(scope="module")
def service(postgres_url: str, redis_url: str) -> Iterator[Service]:
    with (
        migrated_database(postgres_url) as url,
        connected_engine(url) as engine,
        api_client(engine, search_timeout_seconds=0.1, put_wait_seconds=0.1, redis_url=redis_url) as client,
    ):
        job_id = submit(client, ITEMS, collection="docs")["id"]
        encode_waiting(engine)
        add_source(engine, "docs")
        make_schedule(engine, "docs")
        client.post("/v1/webhooks", json={"url": "https://example.com/"}).raise_for_status()
        yield Service(str(client.base_url), job_id, *make_batch(client))


def make_batch(client: httpx.Client) -> tuple[str, str]:
    """The ids of a file of one line, and of a batch of it."""
    answer = client.post("/v1/files", files={"file": ("x.jsonl", b"{}\n")}, data={"purpose": "batch"})
    file_id = str(answer.raise_for_status().json()["id"])
    wanted = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    return file_id, str(client.post("/v1/batches", json=wanted).raise_for_status().json()["id"])


def ask(service: Service, case: Case[Any], names_what_is_there: bool) -> Any:
    """The answer. Half of the requests name what is there, or nearly all would end as not found."""
    if names_what_is_there:
        job_id = service.submit_another() if case.method == "DELETE" else service.job_id
        for name, value in (
            ("job_id", job_id),
            ("file_id", service.file_id),
            ("batch_id", service.batch_id),
            ("name", "docs"),
            ("key", "b"),
            ("webhook_id", "1"),
        ):
            if name in case.path_parameters:
                case.path_parameters[name] = value
        if case.headers and CONFIRMATION in case.headers:
            *_, last = re.findall(r"{(\w+)}", case.path)
            case.headers[CONFIRMATION] = quote(str(case.path_parameters[last]), safe="")
    wait_seconds = (case.query or {}).get("wait_seconds")
    if isinstance(wait_seconds, int | float) and wait_seconds > 1:
        case.query["wait_seconds"] = 1  # nobody encodes what is put here
    note(case.as_curl_command())
    return case.call(base_url=service.url, timeout=PATIENCE_SECONDS)


def read_code(answer: Any) -> str:
    """The last part of a problem's type; empty for what is no problem."""
    if not answer.headers.get("content-type", [""])[0].startswith("application/problem+json"):
        return ""
    return str(json.loads(answer.content)["type"]).rpartition("/")[2]


def check(case: Case[Any], answer: Any) -> None:
    """No failure of the server, and an answer of the form that is described."""
    code = read_code(answer)
    assert answer.status_code < 500 or code in UNAVAILABLE, answer.content
    assert answer.elapsed < PATIENCE_SECONDS
    case.validate_response(
        answer, checks=[status_code_conformance, content_type_conformance, response_schema_conformance]
    )


BOUNDED: Final = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def test_every_operation_of_the_description_is_tried() -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in DOCUMENT["paths"].values())


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_description_allows_is_answered_as_it_says(service: Service, label: str) -> None:
    @BOUNDED
    @given(
        case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE), is_there=st.booleans()
    )
    def try_right_requests(case: Case[Any], is_there: bool) -> None:
        answer = ask(service, case, is_there)
        check(case, answer)
        is_taken = answer.status_code < 400 or answer.status_code in NOT_THERE_OR_NOT_NOW
        is_float = INT_GOT_FLOAT.search(answer.content) is not None  # JSON Schema takes 3.0 for an integer
        assert is_taken or is_float or read_code(answer) in REFUSED_FOR_ITS_MEANING | UNAVAILABLE, (
            answer.content
        )

    try_right_requests()


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_description_forbids_breaks_nothing(service: Service, label: str) -> None:
    if not (OPERATIONS[label].path_parameters or OPERATIONS[label].query or OPERATIONS[label].body):
        return  # there is no wrong request without a parameter

    @BOUNDED
    @given(
        case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE), is_there=st.booleans()
    )
    def try_wrong_requests(case: Case[Any], is_there: bool) -> None:
        check(case, ask(service, case, is_there))

    try_wrong_requests()


def test_neither_an_unknown_method_nor_a_path_with_a_slash_at_its_end_leads_anywhere(
    service: Service,
) -> None:
    """A client that removes the last dots of an item's key makes such a path."""
    there = {"job_id": service.job_id, "file_id": service.file_id, "name": "docs", "key": "b"}
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        for path in DOCUMENT["paths"]:
            target = re.sub(r"\{(\w+)\}", lambda part: there.get(part[1], "1"), path)
            known = {method.upper() for method in DOCUMENT["paths"][path]}
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - known:
                answer = client.request(method, target, headers=JSON)
                assert (answer.status_code, answer.headers["allow"]) == (405, ", ".join(sorted(known))), path
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD") if path != "/" else ():
                headers = JSON | {CONFIRMATION: target.rpartition("/")[2]}
                answer = client.request(method, f"{target}/", headers=headers)
                assert answer.status_code in (404, 405, 422), (method, path, answer.text)
                if answer.status_code == 422 or (answer.status_code == 404 and "/v1/models" not in path):
                    assert method == "HEAD" or "ends with a slash" in answer.json()["detail"]
