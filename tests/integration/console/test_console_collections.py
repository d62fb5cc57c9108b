"""The console's collections on a real API and a real Postgres: the list, a page and its search box."""

import html
import re
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, text

from api.console.words import tell_bytes
from tests.api_server import api_client, encode_waiting, submit
from tests.indexed import execute
from tests.kinds import SCORES
from tests.protocol import make_items
from tests.protocol import submit as submit_job
from tests.queries import listening
from tests.schedules import make_schedule
from vectormill.collections.removals import remove_collection
from vectormill.runs.runs import create_run


@pytest.fixture
def client(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    with api_client(engine, search_timeout_seconds=60, redis_url=redis_url) as client:
        items = [
            {"key": f"k{number}", "text": f"text {number}", "metadata": {"page": number, "lang": "de<i>"}}
            for number in range(20)
        ]
        client.post("/v1/collections", json={"name": "docs", "keep_text": True, "options": {"dimensions": 8}})
        submit(client, items, collection="docs")
        encode_waiting(engine)
        yield client


def words_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", answer.text).split()))


def keys_of(answer: httpx.Response) -> list[str]:
    return re.findall(r'<strong class="breakable">([^<]+)</strong>', answer.text)


def test_a_list_tells_coverage_lag_and_what_goes_on(client: httpx.Client, engine: Engine) -> None:
    client.put(
        "/v1/collections/docs/source",
        json={"kind": "files", "options": {"files": ["/nowhere/*.jsonl"], "key": "id", "text": "text"}},
    )
    execute(
        engine,
        "INSERT INTO vectormill.source_changes (collection_id, key) SELECT id, 'k1' FROM vectormill.collections",
    )
    with engine.begin() as connection:
        ended = create_run(connection, "docs", "reindex")
        assert ended is not None
        connection.execute(
            text("""
                UPDATE vectormill.runs SET state = 'completed_with_errors', num_seen = 40, num_failed = 10,
                       finished_at = now() - interval '3 hours'
            """)
        )
    with engine.begin() as connection:
        create_run(connection, "docs", "check")
    page = client.get("/console/collections")
    said = words_of(page)
    assert 'aria-current="page">Collections' in page.text
    assert "75 % 3 h ago" in said
    assert "check: queued" in said
    said = words_of(client.get("/console/collections/docs"))
    assert "40 rows in the source, 10 failed" in said
    assert "Changes waiting 1" in said
    assert "The live generation has no vector index" in said


def test_a_page_without_collections_says_how_one_is_made(engine: Engine) -> None:
    with api_client(engine) as client:
        assert "There is no collection." in words_of(client.get("/console/collections"))
        assert client.get("/console/collections/none").status_code == 404
        assert client.get("/console/collections/No-Name").status_code == 404


def test_a_search_finds_what_the_api_finds(client: httpx.Client, redis_url: str) -> None:
    with listening(redis_url):
        page = client.get("/console/collections/docs", params={"q": "text 4", "limit": 3})
        asked = client.post("/v1/collections/docs/search", json={"text": "text 4", "limit": 3}).json()
    assert keys_of(page) == [match["key"] for match in asked["data"]]
    assert keys_of(page)[0] == "k4"
    said = words_of(page)
    assert "score 1.0000" in said
    assert '{"lang": "de<i>", "page": 4}' in said
    assert "text 4" in said
    assert "<i>" not in page.text  # what a row holds is text


def test_a_search_by_words_and_by_both_takes_filters_as_the_command_does(
    client: httpx.Client, engine: Engine, redis_url: str
) -> None:
    asked: dict[str, str | int] = {
        "q": "text",
        "mode": "text",
        "filter": "page>=18\nlang=de<i>",
        "limit": 100,
    }
    assert sorted(keys_of(client.get("/console/collections/docs", params=asked))) == ["k18", "k19"]
    with listening(redis_url):
        page = client.get("/console/collections/docs", params={"q": "text 4", "mode": "hybrid"})
    assert "place by nearness 1, by words" in words_of(page)
    page = client.get("/console/collections/docs", params={"like": "k3", "limit": 2})
    assert len(keys_of(page)) == 2
    assert "k3" not in keys_of(page)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"q": "x", "filter": "lang"}, "The filter lang is no filter"),
        ({"q": "x", "filter": '{"a": {"near": 1}}'}, "near"),
        ({"like": "nothing"}, "nothing"),
        ({"like": "k\x00"}, "No item is like more_like"),
        ({"q": "a\x00b"}, "NUL"),
    ],
)
def test_what_cannot_be_searched_is_refused_where_the_hits_would_be(
    client: httpx.Client, asked: dict[str, str], said: str
) -> None:
    page = client.get("/console/collections/docs", params=asked)
    assert page.status_code == 200
    (refusal,) = re.findall(r'<p class="notice card" role="alert">(.*?)</p>', page.text)
    assert said in html.unescape(refusal)


def test_scores_have_no_search_box(engine: Engine) -> None:
    submit_job(engine, make_items(30), collection="judged", spec=SCORES)
    encode_waiting(engine)
    with api_client(engine) as client:
        assert 'role="search"' not in client.get("/console/collections/judged").text


def test_a_generation_that_is_built_shows_how_far_it_is_and_no_secret_of_the_source_is_shown(
    client: httpx.Client, engine: Engine
) -> None:
    execute(
        engine,
        """
        INSERT INTO vectormill.sources (collection_id, kind, options)
        SELECT id, 'sql', '{"query": "SELECT 1", "url": "postgresql://me:hunter2@db/x"}' FROM vectormill.collections
        """,
    )
    make_schedule(engine, "docs")
    with engine.begin() as connection:
        run = create_run(connection, "docs", "reindex")
        assert run is not None
        connection.execute(
            text("""
                WITH built AS (
                    INSERT INTO vectormill.generations (collection_id, fingerprint, spec, state)
                    SELECT collection_id, 'feedfeedfeedfeed', spec, 'building' FROM vectormill.generations
                    RETURNING id
                )
                UPDATE vectormill.runs SET state = 'running', phase = 'encoding', generation_id = built.id,
                       job_id = (SELECT id FROM vectormill.jobs LIMIT 1) FROM built
            """)
        )
        connection.execute(
            text("UPDATE vectormill.jobs SET num_done = 5, state = 'running', finished_at = NULL")
        )
    page = client.get("/console/collections/docs")
    assert "encoding, 25 % encoded" in words_of(page)
    assert "one is being built" in words_of(client.get("/console/collections"))
    assert "hunter2" not in page.text
    assert "postgresql://…@db/x" in page.text
    assert "/console/schedules/docs" in page.text


def test_a_look_at_a_collection_follows_it_to_its_end(client: httpx.Client, engine: Engine) -> None:
    with client.stream("GET", "/console/live/collections/docs") as answer:
        lines = answer.iter_lines()
        assert any("Generations" in line for line in lines)
        remove_collection(engine, "docs")
        rest = "\n".join(lines)
    assert "Collection docs is gone" in rest
    assert "event: end" in rest


def test_the_words_for_bytes_have_two_digits_where_they_matter() -> None:
    sizes = [0, 1023, 1536, 230 << 20, int(4.2 * (1 << 30)), 3 << 40]
    assert [tell_bytes(size) for size in sizes] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "230 MiB",
        "4.2 GiB",
        "3.0 TiB",
    ]
