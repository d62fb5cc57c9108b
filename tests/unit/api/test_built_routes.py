"""The routes of an application are there before its first request."""

import re
from typing import Final

import msgspec
import pytest
from fastapi import routing
from sqlalchemy import create_engine
from starlette.routing import Match

from api.app import create_app
from api.door.scopes import OPERATIONS, SAFE_METHODS
from vectormill.settings import Settings


def test_no_request_waits_until_routes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(), create_engine("postgresql+psycopg://nowhere/nothing"))

    def build(*args: object, **named: object) -> None:
        raise AssertionError("a route was built for a request")

    monkeypatch.setattr(routing._IncludedRouter, "_build_effective_context", build)
    asked = {"type": "http", "method": "GET", "path": "/v1/jobs", "root_path": "", "headers": []}
    assert Match.FULL in {route.matches(dict(asked))[0] for route in app.routes}


# A placeholder with a convertor takes any characters: what a user chose.
CONVERTOR: Final = re.compile(r":\w+}")
# What needs no confirmation although a path that ends with a user's own words can be rewritten to it, and why.
UNCONFIRMED: Final = {
    "DELETE /v1/collections/{name}/items": "names the item in its query, which no client rewrites",
    "PUT /v1/collections/{name}/items": "so does this",
    "DELETE /v1/files/{file_id}": "OpenAI's clients cannot confirm it, and a file's id is random",
    "PUT /v1/collections/{name}/source": "its body cannot be that of a put",
    "PUT /v1/collections/{name}/index": "its body cannot be that of a put",
}


def test_a_path_that_a_client_made_of_an_item_s_destroys_nothing_else() -> None:
    every = OPERATIONS
    in_paths = [each for each in every if CONVERTOR.search(each.path)]
    methods = {each.method for each in in_paths} - set(SAFE_METHODS)
    assert methods == {"PUT", "DELETE"}, "decide what a path of another method can be rewritten to"
    reached = {
        f"{each.method} {each.path}": each
        for each in every
        if each.method in methods and each not in in_paths and not each.is_confirmed
    }
    assert reached.keys() == UNCONFIRMED.keys(), (
        "a new one has to be confirmed, or stand there with its reason"
    )
    for each in reached.values():
        if each.body is not None and not each.path.endswith("/items"):
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(b'{"text": "t"}', type=each.body)
    documented = create_app(Settings(), create_engine("postgresql+psycopg://nowhere/nothing")).openapi()
    names = {f"{each.method} {CONVERTOR.sub('}', each.path)}" for each in every}
    for path, operations in documented["paths"].items():
        assert {f"{method.upper()} {path}" for method in operations} <= names, (
            "it is no row of a feature's table"
        )
