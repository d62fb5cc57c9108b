"""The routes of an application are there before its first request."""

import pytest
from fastapi import routing
from sqlalchemy import create_engine
from starlette.routing import Match

from api.app import create_app
from vectormill.settings import Settings


def test_no_request_waits_until_routes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(), create_engine("postgresql+psycopg://nowhere/nothing"))

    def build(*args: object, **named: object) -> None:
        raise AssertionError("a route was built for a request")

    monkeypatch.setattr(routing._IncludedRouter, "_build_effective_context", build)
    asked = {"type": "http", "method": "GET", "path": "/v1/jobs", "root_path": "", "headers": []}
    assert Match.FULL in {route.matches(dict(asked))[0] for route in app.routes}
