"""The flags of `sources set` follow from the options of each kind of source."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vectormill.cli import endpoint
from vectormill.cli.sources import app
from vectormill.sources.parsing import parse_options
from vectormill.sources.source import KINDS, Source, TreeOptions

SET: list[tuple[list[str], str, dict[str, Any]]] = [
    (
        ["--sql", "SELECT 1", "--key", "id", "--pages"],
        "sql",
        {"query": "SELECT 1", "key": "id", "pages": True},
    ),
    (
        ["--sql", "SELECT 1", "--metadata", "a, b", "--metadata", "c", "--full-every-hours", "24"],
        "sql",
        {"query": "SELECT 1", "metadata": ["a", "b", "c"], "full_every_hours": 24},
    ),
    (
        [
            "--files",
            "s3://bucket/a,b.csv",
            "--files",
            "/data/b.csv",
            "--format",
            "csv",
            "--text-pair",
            "answer",
        ],
        "files",
        {"files": ["s3://bucket/a,b.csv", "/data/b.csv"], "format": "csv", "text_pair": "answer"},
    ),
    (["--tree", "/notes", "--exclude", "drafts/**"], "tree", {"folder": "/notes", "exclude": ["drafts/**"]}),
    (["--push"], "push", {}),
    (["--own-texts"], "own_texts", {}),
]
LEADING = list(dict.fromkeys(flags[0] for flags, _, _ in SET))
# Each with a part of the sentence that refuses it.
REFUSED = [
    ([], f"Name one source: {', '.join(LEADING[:-1])} or {LEADING[-1]}."),
    (["--push", "--tree", "/notes"], "Name one source"),
    (["--tree", "/notes", "--url-env", "URL"], "A source of kind tree takes no --url-env."),
    (["--push", "--key", "id", "--sql", ""], "A source of kind push takes no --key."),
    (["--files", "a", "--pages", "--include", "*.md"], "A source of kind files takes no --pages, --include."),
]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that the command asks its client to set."""
    sent: list[Any] = []

    def set_source(collection: str, kind: str, options: dict[str, Any], **_: Any) -> dict[str, Any]:
        sent.append((collection, kind, options))
        return {"kind": kind, "options": options, "split": {}, "check": None}

    @contextmanager
    def connected(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(set_source=set_source)

    monkeypatch.setattr(endpoint, "connected", connected)
    return sent


@pytest.mark.parametrize(("flags", "kind", "options"), SET)
def test_flags_become_the_kind_of_a_source_and_its_options(
    sent: list[Any], flags: list[str], kind: str, options: dict[str, Any]
) -> None:
    done = CliRunner().invoke(app, ["set", "docs", *flags])
    assert done.exit_code == 0, done.output
    assert sent == [("docs", kind, options)]
    assert isinstance(parse_options(Source(kind, options)), KINDS[kind])


def test_every_kind_of_source_is_set_by_flags_in_a_test() -> None:
    assert {kind for _, kind, _ in SET} == set(KINDS)


@pytest.mark.parametrize(("flags", "reason"), REFUSED)
def test_flags_of_no_kind_of_two_or_of_another_are_refused(
    sent: list[Any], flags: list[str], reason: str
) -> None:
    done = CliRunner().invoke(app, ["set", "docs", *flags])
    assert reason in str(done.exception)
    assert sent == []


def test_options_that_are_left_out_have_their_defaults() -> None:
    read = parse_options(Source("tree", {"folder": "/notes"}))
    assert read == TreeOptions(folder="/notes", include=("*.md", "*.markdown", "*.txt", "*.rst"), exclude=())
