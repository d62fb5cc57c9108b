"""A table of a user's own, as tests of runs find it."""

import pytest
from sqlalchemy import Engine

from tests.papers import follow, make_papers


@pytest.fixture
def papers(engine: Engine) -> str:
    """A table, and a collection `docs` that its query fills; nothing of it is followed yet."""
    make_papers(engine)
    return "papers"


@pytest.fixture
def followed(engine: Engine, papers: str) -> str:
    follow(engine)
    return papers
