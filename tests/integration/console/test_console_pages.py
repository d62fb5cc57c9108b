"""The console's pages on a real API: what they show, what their buttons do, and what they stream."""

import gzip
import html
import io
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, encode_waiting
from tests.api_server import submit as post_items
from tests.database import ask, load_payload
from tests.indexed import execute
from tests.kinds import SCORES
from tests.protocol import claim_next, complete, make_items, submit
from tests.queries import listening
from tests.schedules import list_runs, make_collection, make_schedule
from vectormill.collections.removals import remove_collection
from vectormill.domain.errors import SubmissionTooLarge
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.jobs import find_job, pause_job
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.rows.inputs import RowReading, read_texts
from vectormill.runs.runs import create_run
from vectormill.schedules.schedules import delete_schedule
from vectormill.workers.samples import RECENT, Sample, write_samples
from vectormill.workers.workers import beat_worker, delete_worker
from worker.devices.described import describe_inventory
from worker.launcher import assign_replicas
from worker.placement.placement import draw_placement
from worker.plan import plan_machine
from worker.settings import WorkerSettings

TOKEN = re.compile(r'"X-CSRF-Token": "([0-9a-f]{64})"')
FAILURE = ItemFailure("text-too-long", "Too <b>long</b>.")
INCARNATION = uuid4()
LONG = b'{"text": "' + b"x" * 70_000 + b'"}'
ITEMS = [{"key": "a", "text": "one"}, {"key": "b", "text": "two"}]


def words_of(answer: httpx.Response) -> str:
    """The text of a page, without its tags."""
    assert answer.status_code == 200, answer.text
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", answer.text).split()))


def press(client: httpx.Client, path: str) -> httpx.Response:
    (token,) = TOKEN.findall(client.get("/console/queue").text)
    return client.post(path, headers={"X-CSRF-Token": token, "HX-Request": "true"})


def log_in(client: httpx.Client, engine: Engine, scope: str) -> None:
    secret = make_secret()
    ask(engine, create_key, scope, secret, scope)
    client.cookies.clear()
    (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', client.get("/console/login").text)
    client.post("/console/login", data={"csrf": csrf, "key": secret})


def test_empty_pages_say_how_what_they_list_is_made(client: httpx.Client) -> None:
    assert f"{client.base_url.netloc.decode()} no key" in words_of(client.get("/console/queue"))
    for name, command in (
        ("jobs", "vectormill submit"),
        ("workers", "vectormill worker"),
        ("collections", "vectormill collections create"),
        ("schedules", "vectormill schedules create"),
    ):
        page = client.get(f"/console/{name}")
        assert command in words_of(page)
        assert f'aria-current="page">{name.capitalize()}' in page.text
    for path in (
        f"jobs/{uuid4()}",
        "jobs/nonsense",
        "collections/none",
        "collections/No-Name",
        "collections/none/search?q=x",
        "schedules/none",
        *(f"workers/{name}" for name in ("nobody", "a%00b", "x" * 600, "org/model-cpu0@host")),
    ):
        assert client.get(f"/console/{path}").status_code == 404, path
    for path in ("jobs?state=nonsense", "jobs?after=x", "schedules?after=%00"):
        assert client.get(f"/console/{path}").status_code == 422, path
        assert client.get(f"/console/live/{path}").status_code == 422, path


# -- Jobs --


def test_jobs_are_listed_by_state_a_page_at_a_time(client: httpx.Client, engine: Engine) -> None:
    ids = [submit(engine, make_items(1), chunk_max_items=1).id for _ in range(53)]
    ask(engine, pause_job, ids[0])
    first = client.get("/console/jobs").text
    assert first.count('<tr id="job-') == 50
    (older,) = re.findall(r'href="(/console/jobs\?after=[0-9a-f]{16})"', first)
    assert client.get(older).text.count('<tr id="job-') == 3
    paused = client.get("/console/jobs?state=paused").text
    assert f'id="job-{ids[0]}"' in paused
    assert paused.count('<tr id="job-') == 1
    assert 'hx-sse:connect="/console/live/jobs?state=paused"' in paused
    assert "No job is failed." in client.get("/console/jobs?state=failed").text


def test_jobs_are_selected_by_collection_and_day(client: httpx.Client, engine: Engine) -> None:
    jobs = [submit(engine, make_items(2), collection=name) for name in ("docs", "docs", "tickets")]
    execute(
        engine, f"UPDATE vectormill.jobs SET created_at = '2026-03-01 23:59+00' WHERE id = '{jobs[0].id}'"
    )

    def listed(query: str) -> list[int]:
        answer = client.get(f"/console/jobs?{query}")
        assert answer.status_code == 200, answer.text
        return [place for place, job in enumerate(jobs) if str(job.id) in answer.text]

    assert listed("collection=docs&since=&until=") == [0, 1]
    assert listed("since=2026-03-01&until=2026-03-01") == [0]
    assert listed("since=2026-03-02") == [1, 2]
    assert listed("until=2026-02-28") == []
    assert listed("collection=docs&since=2026-03-02&state=queued") == [1]
    assert "No job of this collection and these days" in words_of(client.get("/console/jobs?collection=none"))
    page = client.get("/console/jobs?collection=docs&since=2026-03-01").text
    assert 'href="/console/jobs?state=failed&amp;collection=docs&amp;since=2026-03-01"' in page
    assert listed("since=0001-01-01&until=9999-12-31") == [0, 1, 2]
    for refused in ("since=yesterday", "until=10000-01-01", "collection=a%00b"):
        assert client.get(f"/console/jobs?{refused}").status_code == 422, refused


def test_a_job_tells_its_errors_and_nothing_of_them_is_markup(client: httpx.Client, engine: Engine) -> None:
    job = submit(engine, make_items(240, "<i>"), chunk_max_items=240)
    complete(engine, claim_next(engine), dict.fromkeys(range(0, 240, 2), FAILURE))
    page = client.get(f"/console/jobs/{job.id}").text
    assert "&lt;i&gt;0" in page
    assert "Too &lt;b&gt;long" in page
    assert "<i>" not in page
    assert "hx-sse:connect" not in page  # it has ended: nothing will change
    errors = client.get(f"/console/jobs/{job.id}/errors").text
    assert errors.count("text-too-long") == 100
    (following,) = re.findall(r'href="(/console/jobs/[^"]+after=[0-9a-f]{16})"', errors)
    assert client.get(following).text.count("text-too-long") == 20


def test_a_stream_follows_a_job_until_its_end(client: httpx.Client, engine: Engine) -> None:
    job = submit(engine, make_items(8))
    seen = ""
    with client.stream("GET", f"/console/live/jobs/{job.id}") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if not seen:
                encode_waiting(engine)
            seen += line + "\n"
    assert "0 of 8 texts" in seen
    assert "8 of 8 texts" in seen
    assert seen.rstrip().endswith("event: end\ndata:")


def test_a_session_of_scope_read_looks_and_takes_results_and_presses_nothing(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)
    make_collection(engine, "docs")
    make_schedule(engine, "docs")
    press(client, "/console/schedules/docs/run")
    (run,) = list_runs(engine, "docs")
    encode_waiting(engine)
    job = submit(engine, make_items(8))
    complete(engine, claim_next(engine))
    for scope, status, state in (("read", 403, "running"), ("write", 200, "paused")):
        log_in(client, engine, scope)
        page = client.get(f"/console/jobs/{job.id}").text
        assert ("disabled aria-describedby" in page) == (scope == "read")
        for path in ("/console/schedules/docs", "/console/collections/docs"):
            assert (f'hx-post="/console/runs/{run.id}' in client.get(path).text) == (scope == "write")
        assert press(client, f"/console/jobs/{job.id}/pause").status_code == status
        assert ask(engine, find_job, job.id).state == state
        assert press(client, "/console/schedules/docs/pause").status_code == status
        lines = client.get(f"/console/jobs/{job.id}/results?format=ndjson").text.splitlines()
        assert len(lines) == 4
    assert press(client, f"/console/jobs/{job.id}/nonsense").status_code == 404


def test_a_job_without_a_collection_is_listed_by_its_file_or_by_what_it_gives(
    client: httpx.Client, engine: Engine
) -> None:
    named = post_items(client, ITEMS, metadata={"file": "<papers>.csv"})["id"]
    numbered = post_items(client, ITEMS, metadata={"file": 7})["id"]
    listed = submit(engine, make_items(1), collection="docs")
    scored = submit(engine, make_items(1), spec=SCORES)
    page = client.get("/console/jobs").text
    for job, title in (
        (named, "&lt;papers&gt;.csv"),
        (numbered, "Vectors of 2 texts"),
        (str(listed.id), "docs"),
        (str(scored.id), "Scores of 1 text"),
    ):
        assert f'<a href="/console/jobs/{job}">{title}</a>' in page
    assert "<strong" in client.get(f"/console/jobs/{named}").text
    assert "&lt;papers&gt;.csv" in client.get(f"/console/jobs/{named}").text


# -- The form --


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
    return target.getvalue()


def send(client: httpx.Client, name: str, content: bytes, **fields: str) -> httpx.Response:
    (token,) = TOKEN.findall(client.get("/console/submit").text)
    headers = {"X-CSRF-Token": token, "HX-Request": "true"}
    return client.post("/console/submit", headers=headers, files={"file": (name, content)}, data=fields)


@pytest.mark.parametrize(
    ("name", "content", "fields", "keys"),
    [
        ("papers.jsonl", b'{"id": 7, "text": "one"}\n{"id": 8, "text": "two"}', {}, ["7", "8"]),
        ("Papers.CSV", b"doi,body\nx/1,one\nx/2,two\n", {"key": "doi", "text": "body"}, ["x/1", "x/2"]),
        ("papers.tsv.gz", gzip.compress(b"text\none\ntwo\n"), {}, ["1", "2"]),
        ("papers.parquet", parquet_of([{"key": "a", "text": "one"}]), {"collection": "docs"}, ["a"]),
        ("C:\\texts\\note.txt", b"one\ntwo", {"text": "no matter"}, ["note.txt"]),
        (".note.md", b"one", {}, [".note.md"]),
        ("p" * 200 + ".jsonl", b'{"text": "one"}', {}, ["1"]),
        ("pairs.csv", b"text,answer\none,two\n", {"pair": "answer"}, ["1"]),
    ],
    ids=["jsonl", "csv", "gzip", "parquet", "windows path", "hidden", "long name", "pairs"],
)
def test_a_file_sent_by_the_form_becomes_a_job_as_that_of_the_command_does(
    client: httpx.Client, engine: Engine, name: str, content: bytes, fields: dict[str, str], keys: list[str]
) -> None:
    answer = send(client, name, content, **fields)
    assert answer.status_code == 204, answer.text
    job = client.get(answer.headers["hx-redirect"].replace("/console/", "/v1/")).json()
    assert job["num_items"] == len(keys)
    assert job["collection"] == fields.get("collection")
    assert name.replace("\\", "/").endswith(job["metadata"]["file"])
    assert job["options"].get("task") == ("score" if "pair" in fields else None)
    with engine.connect() as connection:
        assert [item.key for item in load_payload(connection, claim_next(engine).chunk_id)] == keys


@pytest.mark.parametrize(
    ("name", "content", "fields", "said"),
    [
        ("papers.pdf", b"%PDF", {}, "papers.pdf has no format that is read here; it must end in .jsonl, .csv"),
        ("..", b"{}", {}, "upload has no format that is read here"),
        ("a.csv", b"id,body\n1,one\n", {}, "a.csv has no column 'text'; its columns are 'id', 'body'. Name others"),
        ("a.csv", b"text\none,two\n", {}, "a.csv, line 2: the row has 2 cells, but the header has 1."),
        ("a.parquet", b"no", {}, "a.parquet cannot be read as Parquet"),
        ("a.jsonl", b"", {}, "no items"),
        ("a.jsonl", b'{"key": "a", "text": "x"}\n{"key": "a", "text": "y"}', {}, "'a'"),
        ("a.jsonl", b'{"text": "x"}', {"model": "none"}, "Unknown model 'none'"),
        ("a.jsonl", b'{"text": "x"}', {"collection": "No Name"}, "name"),
        ("a.jsonl", b'{"text": "x"}' * 100_000, {}, "more than 1,048,576 bytes (VECTORMILL_MAX_FILE_BYTES)"),
        ("a.gz", b"", {}, "a.gz has no format that is read here"),
        ("a.md.gz", b"", {}, "a.md.gz has no format that is read here"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' + LONG), {}, "a.jsonl.gz, line 2: more than 65,536 bytes"),
        ("a.md", LONG, {}, "more than 65536 bytes"),
    ],
)  # fmt: skip
def test_what_the_form_cannot_submit_is_a_notice_in_it_and_leaves_nothing(
    engine: Engine, name: str, content: bytes, fields: dict[str, str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with api_client(engine, max_file_bytes=1 << 20, max_line_bytes=1 << 16) as client:
        page = client.get("/console/submit").text
        assert page.index("<form") < page.index('id="notices"') < page.index("</form>")
        answer = send(client, name, content, **fields)
        assert (answer.status_code // 100, answer.headers["hx-retarget"]) == (4, "#notices"), answer.text
        assert said in words_of(httpx.Response(200, text=answer.text))
        assert str(tmp_path) not in answer.text
        assert client.get("/v1/jobs").json()["data"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_unfolds_to_gigabytes_takes_the_memory_of_one_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(SubmissionTooLarge, match="line 1: more than 65,536 bytes"):
            list(read_texts(str(path), RowReading(max_line_bytes=1 << 16)))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_full_disk_is_told_in_the_form(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.console.submission.UPLOAD", "/dev/full")
    answer = send(client, "a.jsonl", b'{"text": "x"}')
    assert (answer.status_code, answer.headers["hx-retarget"]) == (409, "#notices"), answer.text
    assert "No room is left in" in answer.text


def test_only_a_key_that_may_write_submits_a_file(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)
    sent = {"file": ("a.jsonl", b'{"text": "x"}')}
    assert client.post("/console/submit", files=sent).status_code == 403, "without a token"
    for scope, status in (("read", 403), ("write", 204)):
        log_in(client, engine, scope)
        assert ("disabled aria-describedby" in client.get("/console/submit").text) == (scope == "read")
        assert send(client, "a.jsonl", b'{"text": "x"}').status_code == status


# -- Collections --


@pytest.fixture
def searched(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    """An API with the collection `docs`, which has twenty rows and keeps their texts."""
    with api_client(engine, search_timeout_seconds=60, redis_url=redis_url) as client:
        items = [
            {"key": f"k{number}", "text": f"text {number}", "metadata": {"page": number, "lang": "de<i>"}}
            for number in range(20)
        ]
        client.post("/v1/collections", json={"name": "docs", "keep_text": True, "options": {"dimensions": 8}})
        post_items(client, items, collection="docs")
        encode_waiting(engine)
        yield client


def keys_of(answer: httpx.Response) -> list[str]:
    return re.findall(r'<strong class="breakable">([^<]+)</strong>', answer.text)


def test_a_search_finds_what_the_api_finds_and_takes_its_filters(
    searched: httpx.Client, redis_url: str
) -> None:
    path = "/console/collections/docs/search"
    with listening(redis_url):
        page = searched.get(path, params={"q": "text 4", "limit": 3})
        hybrid = searched.get(path, params={"q": "text 4", "mode": "hybrid"})
        asked = searched.post("/v1/collections/docs/search", json={"text": "text 4", "limit": 3}).json()
    assert keys_of(page) == [match["key"] for match in asked["data"]]
    assert keys_of(page)[0] == "k4"
    said = words_of(page)
    assert "score 1.0000" in said
    assert '{"lang": "de<i>", "page": 4}' in said
    assert "text 4" in said
    assert "<i>" not in page.text  # what a row holds is text
    assert "rank by similarity 1, by words" in words_of(hybrid)
    filters = {"q": "text", "mode": "text", "filter": "page>=18\nlang=de<i>", "limit": "100"}
    assert sorted(keys_of(searched.get(path, params=filters))) == ["k18", "k19"]
    nowhere = searched.get(path, params={"q": "text", "mode": "text", "filter": "page>=18\nnosuch=4"})
    assert "No row that was sampled has the metadata field nosuch." in words_of(nowhere)
    body = {"text": "text", "mode": "text", "filter": {"page": {"gte": 18}, "nosuch": 4}}
    answer = searched.post("/v1/collections/docs/search", json=body).json()
    assert (answer["data"], answer["missing_fields"]) == ([], ["nosuch"])
    like = keys_of(searched.get(path, params={"like": "k3", "limit": 2}))
    assert len(like) == 2
    assert "k3" not in like
    for refused, why in (
        ({"q": "x", "filter": "lang"}, "Invalid filter lang: expected name=value"),
        ({"q": "x", "filter": '{"a": {"near": 1}}'}, "near"),
        ({"like": "nothing"}, "nothing"),
        ({"like": "k\x00"}, "more_like is not the key of an item"),
        ({"q": "a\x00b"}, "NUL"),
    ):
        page = searched.get(path, params=refused)
        assert page.status_code == 200
        (refusal,) = re.findall(r'<p class="notice card" role="alert">(.*?)</p>', page.text)
        assert why in html.unescape(refusal)


def test_a_collection_shows_coverage_lag_and_what_is_built_but_no_secret_of_its_source(
    searched: httpx.Client, engine: Engine
) -> None:
    execute(
        engine,
        """
        INSERT INTO vectormill.sources (collection_id, kind, options)
        SELECT id, 'sql', '{"query": "SELECT 1", "url": "postgresql://me:hunter2@db/x"}' FROM vectormill.collections
        """,
    )
    execute(
        engine,
        "INSERT INTO vectormill.source_changes (collection_id, key) SELECT id, 'k1' FROM vectormill.collections",
    )
    make_schedule(engine, "docs")
    with engine.begin() as connection:
        assert create_run(connection, "docs", "reindex") is not None
        connection.execute(
            text("""
                UPDATE vectormill.runs SET state = 'completed_with_errors', num_seen = 40, num_failed = 10,
                       finished_at = now() - interval '3 hours'
            """)
        )
    ask(engine, create_run, "docs", "check")
    page = searched.get("/console/collections")
    said = words_of(page)
    assert "75 % 3 h ago" in said
    assert "check: queued" in said
    with engine.begin() as connection:
        connection.execute(
            text("""
                WITH built AS (
                    INSERT INTO vectormill.generations (collection_id, fingerprint, spec, state)
                    SELECT collection_id, 'feedfeedfeedfeed', spec, 'building' FROM vectormill.generations
                    RETURNING id
                )
                UPDATE vectormill.runs SET state = 'running', phase = 'encoding', generation_id = built.id,
                       job_id = (SELECT id FROM vectormill.jobs LIMIT 1) FROM built WHERE runs.kind = 'check'
            """)
        )
        connection.execute(
            text("UPDATE vectormill.jobs SET num_done = 5, state = 'running', finished_at = NULL")
        )
    page = searched.get("/console/collections/docs")
    said = words_of(page)
    for part in (
        "40 rows in the source, 10 failed",
        "Changes waiting 1",
        "The live generation has no vector index",
        "encoding, 25 % encoded",
        "postgresql://…@db/x",
    ):
        assert part in said
    assert "hunter2" not in page.text
    assert "/console/schedules/docs" in page.text
    assert "one is being built" in words_of(searched.get("/console/collections"))


def test_scores_have_no_search_box(client: httpx.Client, engine: Engine) -> None:
    submit(engine, make_items(30), collection="judged", spec=SCORES)
    encode_waiting(engine)
    assert 'role="search"' not in client.get("/console/collections/judged").text
    assert 'role="alert"' in client.get("/console/collections/judged/search?q=x").text


# -- Schedules --


@pytest.fixture
def scheduled(client: httpx.Client, engine: Engine) -> httpx.Client:
    make_collection(engine, "docs")
    make_schedule(engine, "docs", "0 2 * * *", timezone="Europe/Berlin")
    return client


def end_runs(engine: Engine, state: str, error: str | None = None, **counts: int) -> None:
    numbers = "".join(f", {name} = {number}" for name, number in counts.items())
    with engine.begin() as connection:
        connection.execute(
            text(f"""
                UPDATE vectormill.runs
                   SET state = :state, error = :error, finished_at = now(),
                       started_at = now() - interval '90 s'{numbers}
                 WHERE finished_at IS NULL
            """),
            {"state": state, "error": error},
        )


def test_the_buttons_of_a_schedule_act_and_its_history_tells_counts_and_reasons(
    scheduled: httpx.Client, engine: Engine
) -> None:
    assert "Paused since" in words_of(press(scheduled, "/console/schedules/docs/pause"))
    assert "paused" in words_of(scheduled.get("/console/schedules"))
    assert "Paused since" not in press(scheduled, "/console/schedules/docs/resume").text
    assert "queued" in words_of(press(scheduled, "/console/schedules/docs/run"))
    assert [run.state for run in list_runs(engine, "docs")] == ["queued"]
    end_runs(engine, "completed", num_seen=1200, num_new=3)
    press(scheduled, "/console/schedules/docs/run")
    end_runs(engine, "failed", "The source <b>cannot</b> be read.")
    page = scheduled.get("/console/schedules/docs")
    said = words_of(page)
    assert "manual completed" in said
    assert "1 min 30 s 1,200 seen · 3 new" in said
    assert "Failed once since its last success. The source" in said
    assert "&lt;b&gt;cannot&lt;/b&gt;" in page.text  # what a source says is text
    assert press(scheduled, "/console/schedules/docs/explode").status_code == 404
    assert press(scheduled, "/console/schedules/none/pause").status_code == 404


def hold_run(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.runs SET state = 'held', phase = 'comparing', error = 'Many.'")
        )


def test_a_run_that_is_held_is_confirmed_or_cancelled_where_it_is_listed(
    scheduled: httpx.Client, engine: Engine
) -> None:
    press(scheduled, "/console/schedules/docs/run")
    (run,) = list_runs(engine, "docs")
    confirm, cancel = (f"/console/runs/{run.id}/{wish}" for wish in ("confirm", "cancel"))

    def see() -> list[tuple[bool, bool]]:
        pages = [
            scheduled.get(path).text for path in ("/console/schedules/docs", "/console/collections/docs")
        ]
        return [(confirm in page, cancel in page) for page in pages]

    assert see() == [(False, True)] * 2
    refused = press(scheduled, confirm)
    assert (refused.status_code, refused.headers["hx-retarget"]) == (409, "#notices")
    hold_run(engine)
    assert see() == [(True, True)] * 2
    assert press(scheduled, confirm).status_code == 204
    assert [each.state for each in list_runs(engine, "docs")] == ["queued"]
    hold_run(engine)
    assert press(scheduled, cancel).status_code == 204
    assert [each.state for each in list_runs(engine, "docs")] == ["cancelled"]
    assert see() == [(False, False)] * 2
    assert press(scheduled, f"/console/runs/{run.id}/forget").status_code == 404


# -- Workers --


def beat(engine: Engine, name: str, report: dict[str, Any], launcher: UUID | None = None) -> None:
    assert ask(engine, beat_worker, name, INCARNATION, DEFAULT_MODEL, 4, report, launcher)


def report_of(placement: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": "running",
        "state_reason": "",
        "device": {"value": "cuda:0", "reason": "the first that is free"},
        "backend": {"value": "torch", "reason": "the only one on <cuda>"},
        "precision": {"value": "bf16", "reason": "the device has bf16 matrix instructions"},
        "attention": "packed",
        "notes": ["int8 was not chosen."],
        "num_restarts": 0,
        "padding_waste": 0.02,
        "bound_by": {"value": "run", "reason": "The device was computing in 90% of the time."},
        "placement": placement,
        "device_memory_used_bytes": 6 << 30,
        "device_memory_total_bytes": 24 << 30,
        "device_utilisation": 0.93,
        RECENT: write_samples([Sample(10.0 * ago, 1000.0 * ago, 6000, 90 + ago) for ago in range(5, 0, -1)]),
    }


def test_a_worker_that_reports_little_or_nonsense_is_shown_all_the_same(
    client: httpx.Client, engine: Engine
) -> None:
    less: tuple[dict[str, Any], ...] = (
        {},
        {"state": "loading", "recent": "?"},
        {"placement": {"strategy": "replicate", "stages": []}},  # without the plan's own sentences
        {"placement": [], "device": None, "bound_by": None, "notes": None},
    )
    for report in less:
        beat(engine, "new", report)
        said = words_of(client.get("/console/workers/new"))
        assert "No samples yet" in said
        assert "This worker reports no plan" in said


def test_a_worker_shows_its_minutes_its_choices_and_the_plan_as_the_command_prints_it(
    client: httpx.Client, engine: Engine
) -> None:
    card = Registry({}).outline(DEFAULT_MODEL)
    (planned,) = plan_machine([card], describe_inventory("2x24GiB"), WorkerSettings())
    launcher = uuid4()
    for number, assignment in enumerate(assign_replicas(planned)):
        uses = [
            {"name": f"cuda:{rank}", "memory_used_bytes": (7 - rank) << 30, "utilisation": 0.5}
            for rank in (0, 1)
        ]
        beat(engine, f"m-cuda{number}@host", report_of(dict(assignment.part)) | {"devices": uses}, launcher)
    page = client.get("/console/workers/m-cuda0@host")
    said = words_of(page)
    assert "one of 2 replicas" in said
    assert "backend torch the only one on <cuda>" in said
    assert "int8 was not chosen." in said
    assert "cuda:0 7.0 GiB, busy 50 %; cuda:1 6.0 GiB, busy 50 %" in said
    assert "10 s 1,000 6,000 MiB 91 %" in said
    assert draw_placement(planned.placement) in html.unescape(page.text)
    for chart in ("rates", "memory", "busy"):
        assert f'id="{chart}"' in page.text


def test_a_stream_ends_when_its_subject_is_gone(client: httpx.Client, engine: Engine) -> None:
    make_collection(engine, "docs")
    encode_waiting(engine)
    make_schedule(engine, "nightly", collection="docs")
    beat(engine, "org/model@host", report_of({}))

    def delete_nightly() -> None:
        ask(engine, delete_schedule, "nightly")

    def delete_host() -> None:
        ask(engine, delete_worker, "org/model@host", INCARNATION)

    for path, begun, delete, gone in (
        (
            "workers/org/model@host",
            "The worker is running",
            delete_host,
            "Worker org/model@host no longer exists",
        ),
        ("schedules/nightly", "Next due at", delete_nightly, "Schedule nightly no longer exists"),
        (
            "collections/docs",
            "Generations",
            lambda: remove_collection(engine, "docs"),
            "Collection docs no longer exists",
        ),
    ):
        with client.stream("GET", f"/console/live/{path}") as answer:
            lines = answer.iter_lines()
            assert any(begun in line for line in lines)
            delete()
            rest = "\n".join(lines)
        assert gone in rest
        assert "event: end" in rest
