"""A table of a user's own, as tests of runs find it."""

import pytest
from sqlalchemy import Engine

from tests.papers import follow, make_papers
from tests.protocol import SPEC


@pytest.fixture
def papers(request: pytest.FixtureRequest, engine: Engine) -> str:
    """A table, and a collection `docs`, of the spec given, that its query fills; nothing of it is followed yet."""
    make_papers(engine, getattr(request, "param", SPEC))
    return "papers"


@pytest.fixture
def followed(engine: Engine, papers: str) -> str:
    follow(engine)
    return papers
