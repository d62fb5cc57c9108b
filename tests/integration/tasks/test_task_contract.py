"""What every task keeps, whatever it answers: on each kind of model, through engine, chunks, Postgres and API.

A task of which kinds.py has no entry fails here by its name.
"""

import io
import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import JSON, api_client
from tests.chunk_work import encode_all
from tests.ill_on_demand import FACTORY, ILL, MOODY
from tests.integration.tasks.kinds import KINDS, MAX_CHARS, Item, Kind, are_alike, to_bytes
from tests.models import DEVICE
from tests.protocol import claim_next
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RESULTS, TASKS
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.item import ENCODING_FAILED, OUT_OF_MEMORY, ItemFailure
from vectormill.jobs.jobs import retry_job
from vectormill.models.specs import MODEL_KINDS
from vectormill.ragged import Ragged
from worker.batching.batch import OwnedBatch
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.engine.request_queue import LengthLimit
from worker.settings import WorkerSettings

CHUNK_ITEMS = 5


@dataclass(frozen=True)
class Subject:
    """One kind with its model loaded."""

    kind: Kind
    models: Any
    engine: EncodingEngine
    spec: EncodingSpec
    cache_dir: Path

    def ask(self, items: list[Item]) -> EncodeResult:
        request = EncodeRequest("r", self.spec, [to_bytes(item) for item in items], False, MAX_CHARS)
        return self.engine.encode(request, threading.Event())


@contextmanager
def loading(kind: Kind, directory: Path, cache_dir: Path) -> Iterator[EncodingEngine]:
    """The kind's model in a process that can be told to fall ill."""
    (cache_dir / FACTORY).write_text(kind.factory)
    # Nothing is remembered: the same text is to reach the model again, in other company.
    settings = WorkerSettings(
        backend=kind.backend, precision="fp32", threads=1, max_batch_tokens=256, reuse_bytes=0
    )
    engine = EncodingEngine(
        kind.card(directory), DEVICE, settings, cache_dir, factory="tests.ill_on_demand:load"
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Of every kind one, each made when it is first asked for; tasks of one model share its process."""
    directory = tmp_path_factory.mktemp("models")
    with ExitStack() as cleanup:
        yield Subjects(directory, tmp_path_factory, cleanup)


class Subjects(dict[str, Subject]):
    def __init__(self, directory: Path, factory: pytest.TempPathFactory, cleanup: ExitStack) -> None:
        super().__init__()
        self._directory, self._factory, self._cleanup = directory, factory, cleanup
        self._engines: dict[str, tuple[EncodingEngine, Path]] = {}

    def __missing__(self, name: str) -> Subject:
        kind = next(kind for kind in KINDS if kind.id == name)
        if kind.model not in self._engines:
            cache_dir = self._factory.mktemp("cache")
            engine = self._cleanup.enter_context(loading(kind, self._directory, cache_dir))
            self._engines[kind.model] = engine, cache_dir
        engine, cache_dir = self._engines[kind.model]
        self[name] = Subject(kind, kind.entry(self._directory), engine, kind.spec(self._directory), cache_dir)
        return self[name]


@pytest.fixture(params=[kind.id for kind in KINDS])
def subject(
    request: pytest.FixtureRequest, subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> Subject:
    next(kind for kind in KINDS if kind.id == request.param).register(monkeypatch)
    return subjects[request.param]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_an_entry_for_every_kind_of_model_that_it_is_for(task: str) -> None:
    asked = {kind.name for kind in MODEL_KINDS if task in kind.tasks}
    assert asked, f"no kind of model is for the task {task}: vectormill/models/specs.py"
    tried = {kind.name for kind in KINDS if kind.task == task}
    assert tried == asked, f"tests/integration/tasks/kinds.py needs an entry for {task} of {asked - tried}"


def read(result: EncodeResult, index: int) -> Any:
    """One item's result, as lists of numbers or what its JSON says."""
    row = result.results.row(index)
    return json.loads(row.tobytes()) if row.dtype == np.uint8 else row.tolist()


def test_a_result_is_the_same_alone_in_any_company_and_in_any_order(subject: Subject) -> None:
    kind = subject.kind
    sound = [*kind.items, kind.long]
    alone = [subject.ask([item]) for item in sound]
    assert not any(result.failures for result in alone)
    assert [result.truncated.tolist() for result in alone] == [[False]] * len(kind.items) + [[True]]
    dice = random.Random(7)
    # The same twice, neighbours that fail, and an order that no batch keeps.
    company: list[tuple[int, Item]] = [*enumerate(sound), *enumerate(sound[:3])]
    company += [(-1, item) for item in kind.failing.values()]
    for _ in range(2):
        dice.shuffle(company)
        check_company(subject, company, alone)


def check_company(subject: Subject, company: list[tuple[int, Item]], alone: list[EncodeResult]) -> None:
    """Each item with its place among those that were asked for alone; those that fail have none."""
    result = subject.ask([item for _, item in company])
    for place, (index, item) in enumerate(company):
        if index < 0:
            continue
        assert place not in result.failures, item
        assert are_alike(read(result, place), read(alone[index], 0)), item
        assert result.num_tokens[place] == alone[index].num_tokens[0] > 0
        assert result.truncated[place] == alone[index].truncated[0]
    # Duplicates are one computation.
    by_index: dict[int, set[str]] = {}
    for place, (index, _) in enumerate(company):
        by_index.setdefault(index, set()).add(json.dumps(read(result, place)) if index >= 0 else "")
    assert {len(found) for found in by_index.values()} == {1}
    assert result.num_reused == sum(index >= 0 for index, _ in company) - len(alone)


def test_an_item_fails_alone_and_with_its_own_code(subject: Subject) -> None:
    failing = subject.kind.failing
    result = subject.ask([*failing.values(), subject.kind.items[0]])
    assert {index: failure.code for index, failure in result.failures.items()} == dict(enumerate(failing))
    assert result.num_tokens.tolist()[:-1] == [0] * len(failing)
    assert not result.truncated.any()
    assert result.num_tokens[-1] > 0


@pytest.mark.parametrize("interactive", [False, True], ids=["bulk", "interactive"])
def test_a_text_for_which_the_plan_has_no_room_fails_before_it_is_encoded(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    kind, engine = subject.kind, subject.engine
    seen: list[int] = []
    deliver = engine._queue.deliver

    def note(work: OwnedBatch, *outcome: Any) -> None:
        seen.append(work.batch.max_length)
        deliver(work, *outcome)

    monkeypatch.setattr(engine._queue, "deliver", note)
    expected = subject.ask(list(kind.items))
    longest = max(seen)
    monkeypatch.setattr(engine._queue, "_longest", LengthLimit(longest))
    seen.clear()
    items = [kind.long, *kind.items]
    request = EncodeRequest("r", subject.spec, [to_bytes(item) for item in items], interactive, MAX_CHARS)
    result = engine.encode(request, threading.Event())
    assert {index: failure.code for index, failure in result.failures.items()} == {0: OUT_OF_MEMORY}
    assert f"at most {longest:,}. `vectormill plan` says" in result.failures[0].detail
    assert max(seen) <= longest, "no process has seen it"
    assert (result.num_tokens[0], result.truncated[0]) == (0, False)
    for place in range(len(kind.items)):
        assert are_alike(read(result, place + 1), read(expected, place))


def test_a_request_of_nothing_that_can_be_read_is_answered(subject: Subject) -> None:
    failing = list(subject.kind.failing.values())
    result = subject.ask(failing)
    assert len(result.failures) == len(result.results) == len(failing)
    assert result.num_computed_tokens == 0


def submit(client: httpx.Client, subject: Subject, items: list[Item]) -> dict[str, Any]:
    options = {"task": subject.kind.told_task, **subject.kind.options}
    body = {
        "model": subject.kind.model,
        "items": [{"key": f"k{number}", **item} for number, item in enumerate(items)],
        "options": {name: value for name, value in options.items() if value is not None},
    }
    answer = client.post("/v1/jobs", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def read_results(client: httpx.Client, job: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """By key, without it; the same in every format that has rows."""
    task = TASKS[job["options"].get("task", "embed")]
    path = f"/v1/jobs/{job['id']}/{RESULTS[task.result].route}"
    lines = client.get(path, params=parameters)
    assert lines.status_code == 200, lines.text
    rows = [json.loads(line) for line in lines.text.splitlines()]
    table = client.get(path, params={**parameters, "format": "parquet"})
    columns = pq.read_table(io.BytesIO(table.content)).to_pylist()
    assert [row["key"] for row in rows] == [row["key"] for row in columns]
    for row, column in zip(rows, columns, strict=True):
        for name, value in column.items():
            written = json.loads(value) if name == "output" else value
            assert are_alike(written, row[name]), (name, row["key"])
    return {row.pop("key"): row for row in rows}


@pytest.fixture
def client(engine: Engine, subject: Subject) -> Iterator[httpx.Client]:
    with api_client(
        engine, models=subject.models, chunk_max_items=CHUNK_ITEMS, max_text_chars=MAX_CHARS
    ) as client:
        yield client


def test_results_are_stored_counted_and_read_back(
    client: httpx.Client, engine: Engine, subject: Subject
) -> None:
    kind = subject.kind
    items = [*kind.items, *kind.failing.values(), kind.long, kind.items[0]]
    direct = subject.ask(items)
    job = submit(client, subject, items)
    with_settings = MaxChars(subject.engine)
    assert set(encode_all(engine, with_settings, kind.model)) == {"done"}
    found = read_results(client, job)
    sound = [number for number in range(len(items)) if number not in direct.failures]
    assert list(found) == [f"k{number}" for number in sound]
    for number in sound:
        assert are_alike(plain(found[f"k{number}"]), read(direct, number)), items[number]
    ended = client.get(f"/v1/jobs/{job['id']}").json()
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == (
        "completed_with_errors",
        len(sound),
        len(kind.failing),
    )
    assert ended["num_tokens"] == int(direct.num_tokens.sum())
    assert ended["truncated_items"] == int(direct.truncated.sum()) == 1
    errors = client.get(f"/v1/jobs/{job['id']}/errors").json()["data"]
    assert [error["code"] for error in errors] == list(kind.failing)


class MaxChars:
    """An engine that is asked with the limit that the API here has, as every process of a deployment has one."""

    def __init__(self, engine: EncodingEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        return self._engine.encode(replace(request, max_text_chars=MAX_CHARS), cancelled)


class FirstFails(MaxChars):
    """One in whose first answers the first item of each chunk has failed, for no reason of its own."""

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        result = super().encode(request, cancelled)
        failures = {**result.failures, 0: ItemFailure(ENCODING_FAILED, "for this test")}
        num_tokens, truncated = result.num_tokens.copy(), result.truncated.copy()
        num_tokens[0], truncated[0] = 0, False
        lengths = result.results.lengths
        if result.results.values.dtype == np.uint8:  # a failed item's row may be anything
            rows = [result.results.row(index) for index in range(1, len(lengths))]
            result = replace(result, results=Ragged.from_rows([rows[0][:0], *rows], np.uint8))
        return replace(result, failures=failures, num_tokens=num_tokens, truncated=truncated)


def plain(row: dict[str, Any]) -> Any:
    """What the engine gives, of a row of the API."""
    if "embedding" in row:
        return row["embedding"]
    return [row["score"]] if "score" in row else row["output"]


def test_results_survive_a_retry_and_a_split(client: httpx.Client, engine: Engine, subject: Subject) -> None:
    kind = subject.kind
    items = list(kind.items)
    direct = subject.ask(items)
    job = submit(client, subject, items)
    flawed = FirstFails(subject.engine)
    assert set(encode_all(engine, flawed, kind.model)) == {"done"}
    firsts = [f"k{number}" for number in range(0, len(items), CHUNK_ITEMS)]
    before = read_results(client, job)
    assert sorted({f"k{number}" for number in range(len(items))} - before.keys()) == sorted(firsts)
    with engine.begin() as connection:
        retry_job(connection, job["id"])
    again = client.get(f"/v1/jobs/{job['id']}/{RESULTS[TASKS[kind.task].result].route}")
    assert again.status_code == 409, "the job is open again"
    partial = read_results(client, job, partial=True)
    assert partial == before
    with engine.begin() as connection:
        split_chunk(connection, claim_next(engine), "lost twice")
    assert set(encode_all(engine, MaxChars(subject.engine), kind.model)) == {"done"}
    whole = read_results(client, job)
    assert list(whole) == [f"k{number}" for number in range(len(items))]
    for number in range(len(items)):
        assert are_alike(plain(whole[f"k{number}"]), read(direct, number))
    assert {key: whole[key] for key in before} == before, "what was done stays as it was, to the bit"
    ended = client.get(f"/v1/jobs/{job['id']}").json()
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == ("completed", len(items), 0)


def test_an_error_that_does_not_stay_blames_no_text_and_the_process_is_believed(subject: Subject) -> None:
    items = list(subject.kind.items)
    before, num_restarts = subject.ask(items), subject.engine.report()["num_restarts"]
    (subject.cache_dir / MOODY).touch()
    result = subject.ask(items)
    assert not (subject.cache_dir / MOODY).exists()
    assert not result.failures
    assert subject.engine.report()["num_restarts"] == num_restarts
    assert len(result.results) == len(before.results)


def test_a_process_whose_answers_are_nonsense_is_found_and_replaced(subject: Subject) -> None:
    items = list(subject.kind.items)
    num_restarts = subject.engine.report()["num_restarts"]
    (subject.cache_dir / ILL).touch()
    ill = subject.ask(items)
    assert not (subject.cache_dir / ILL).exists()
    assert not ill.failures
    assert subject.engine.report()["num_restarts"] == num_restarts + 1
    for number, item in enumerate(items):
        assert are_alike(read(ill, number), read(subject.ask([item]), 0)), item
