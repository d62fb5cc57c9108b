"""A route of an operation answers as FastAPI would, whose handling of requests it replaces."""

import asyncio
from itertools import product
from typing import Annotated, Any, Final

import httpx
import msgspec
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Request
from fastapi.routing import APIRoute
from sqlalchemy import create_engine

from api.app import create_app
from api.dependencies import CollectionName, JobId, ResourcesDependency
from api.intake.requests import IdempotencyKey
from api.problems import register_handlers
from api.serving import OperationRoute, serve
from vectormill.domain.errors import InvalidItem
from vectormill.operation import Operation
from vectormill.settings import Settings

ENGINE: Final = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
JOB_ID: Final = "0198e4a0-0000-7000-8000-000000000000"


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1)] = 50


def check_page(request: Request, page: Annotated[str, Path()]) -> None:
    if "lost" in request.headers:
        raise InvalidItem(page)


def double(page: Annotated[str, Path()]) -> str:
    return 2 * page


OPERATION: Final = Operation(
    "DELETE", "/things/{name}/{job_id}/{page}", "read", dict[str, Any], body=Wanted, query=Asked
)


async def answer_at_once(
    request: Request,
    name: CollectionName,
    resources: ResourcesDependency,
    job_id: JobId,
    page: Annotated[int, Path(ge=1, le=9)],
    doubled: Annotated[str, Depends(double)],
    query: Asked,
    body: Wanted,
    idempotency_key: IdempotencyKey,
    prefer: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    given = [name, str(job_id), page, doubled, query.limit, body.text, idempotency_key, prefer]
    return {"path": request.url.path, "limit": resources.settings.max_requests, "given": given}


def answer_on_a_thread(body: Wanted, page: Annotated[int, Path(ge=1, le=9)], query: Asked) -> str:
    return f"{body.text} {page} {query.limit}"


REQUESTS: Final = [
    (path, {**headers, **confirmed}, body)
    for path, headers, confirmed, body in product(
        (
            f"/things/docs/{JOB_ID}/7",
            f"/things/docs/{JOB_ID}/7?limit=3",
            f"/things/docs/{JOB_ID}/7?limit=0",
            f"/things/docs/{JOB_ID}/7?other=1",
            f"/things/docs/{JOB_ID}/77",
            f"/things/docs/{JOB_ID}/x",
            f"/things/no%20name/{JOB_ID}/7",
            "/things/docs/0198/7",
        ),
        (
            {},
            {"Idempotency-Key": "abc", "Prefer": "wait"},
            {"Idempotency-Key": "\t", "Prefer": "wait=10"},
            {"lost": "1"},
        ),
        ({}, {"Vectormill-Confirm": "7"}, {"Vectormill-Confirm": "77"}, {"Vectormill-Confirm": "x"}),
        (b'{"text": "t"}', b'{"text": 1}', b"["),
    )
]


def ask_all(handler: Any) -> list[tuple[int, str, str]]:
    """The status, the type and the body of the answer to each request, by routes made now."""
    router = APIRouter()
    serve(router, OPERATION, check_page)(handler)
    app = FastAPI()
    app.state.resources = create_app(Settings(), ENGINE).state.resources
    app.include_router(router)
    register_handlers(app)

    async def ask() -> list[tuple[int, str, str]]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            json = {"Content-Type": "application/json"}
            answers = [
                await client.request("DELETE", path, headers=json | headers, content=body)
                for path, headers, body in REQUESTS
            ]
            return [(each.status_code, each.headers["content-type"], each.text) for each in answers]

    return asyncio.run(ask())


@pytest.mark.parametrize("handler", [answer_at_once, answer_on_a_thread])
def test_a_route_answers_as_the_framework_does(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ask_all(handler)
    monkeypatch.setattr(OperationRoute, "get_route_handler", APIRoute.get_route_handler)
    for request, found, expected in zip(REQUESTS, own, ask_all(handler), strict=True):
        assert found == expected, request
    assert {status for status, *_ in own} >= {200, 422, 428}
