"""The canary: a new generation that lacks something is not made live, and the reason is said."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine

from indexer import checking as canary
from indexer.checking import check_generation
from indexer.swapping import PATIENCE_SECONDS, swap
from tests.api_server import encoding_meanwhile
from tests.building import BITS, NEXT, Rebuild, build, encode_all, put, rows_of, table_of
from tests.database import ask, execute
from tests.indexers import start_run
from tests.kinds import RECORDS, SCORES
from tests.protocol import SPEC, claim, complete, dispatch_all, make_items
from vectormill.collections import generations
from vectormill.collections.collections import find_building, find_generation
from vectormill.collections.items import delete_items
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CanaryFailed, LeaseLost, RunCancelled, SwapRefused
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import EMPTY_TEXT, ENCODING_FAILED, ItemFailure
from vectormill.runs.runs import cancel_run, claim_run, hold_run

ITEMS = make_items(30)


@pytest.fixture
def rebuild(request: pytest.FixtureRequest, engine: Engine) -> Rebuild:
    """Its parameter is the spec of the live generation."""
    spec: EncodingSpec = getattr(request, "param", SPEC)
    put(engine, "old", spec=spec)
    encode_all(engine)
    made = Rebuild(engine, ITEMS, replace(spec, revision="2"))
    put(engine, "meanwhile", "deleted", spec=spec)
    encode_all(engine)
    ask(engine, delete_items, "docs", ["deleted", "k3"])
    return made


def test_a_sound_generation_passes_and_its_report_says_what_was_measured(
    engine: Engine, rebuild: Rebuild
) -> None:
    execute(
        engine, f"CREATE INDEX ON {table_of(rebuild.generation)} USING hnsw (embedding halfvec_cosine_ops)"
    )
    with encoding_meanwhile(engine):
        check_generation(rebuild.context())
    report = rebuild.reports["checking"]
    assert report["coverage"]["num_missing"] == report["coverage"]["num_missing_puts"] == 0
    assert report["vectors"]["num_rows"] == 30
    assert report["recall"]["value"] >= 0.95
    assert report["texts"]["num_compared"] >= 20
    assert report["texts"]["smallest"] > 0.999
    assert report["is_good"] is True
    swap(rebuild.context())
    assert rebuild.reports["swapping"]["live"] == rebuild.generation.id
    assert set(rows_of(engine, "docs")) == {item.key for item in ITEMS} - {"k3"} | {"meanwhile"}
    swap(rebuild.context())
    check_generation(rebuild.context())


BROKEN: list[tuple[EncodingSpec, str, str]] = [
    (SPEC, "DELETE FROM {table} WHERE key = 'k7'", "1 rows of the source are missing, among them 'k7'"),
    (SPEC, "DELETE FROM {table} WHERE key = 'meanwhile'", "1 items put since then are missing, among them 'meanwhile'"),
    (SPEC, "UPDATE {table} SET embedding = '[0,0,0,0,0,0,0,0]' WHERE key = 'k5'", "1 vectors have no direction.*k5"),
    (SPEC, "UPDATE {table} SET embedding = '[3,0,0,0,0,0,0,0]' WHERE key = 'k5'", "1 vectors do not have length 1"),
    (SCORES, "UPDATE {table} SET score = 'NaN' WHERE key = 'k5'", r"1 scores are not numbers.*\('k5'\)"),
    (SCORES, "UPDATE {table} SET numbers = '[1,0,0]'", r"the worst agrees to .*, less than 0.98"),
    (RECORDS, "DELETE FROM {table} WHERE key = 'meanwhile'", "1 items put since then are missing"),
    (RECORDS, "UPDATE {table} SET output = '{{}}'", r"the worst agrees to 0.0.*, less than 1"),
    (
        SPEC,
        "UPDATE {table} SET embedding = '[1,0,0,0,0,0,0,0]'",
        "texts that were encoded again, the worst agrees to",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rebuild", "statement", "reason"), BROKEN, indirect=["rebuild"])
def test_a_generation_that_lacks_something_is_not_made_live(
    engine: Engine, rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch, statement: str, reason: str
) -> None:
    monkeypatch.setattr(canary, "_PAUSE_SECONDS", 0.0)
    execute(engine, statement.format(table=table_of(rebuild.generation)))
    live = ask(engine, find_generation, "docs")
    with encoding_meanwhile(engine), pytest.raises(CanaryFailed, match=reason):
        check_generation(rebuild.context())
    assert ask(engine, find_generation, "docs") == live
    assert ask(engine, find_building, "docs") == rebuild.generation
    assert rebuild.reports["checking"]["is_good"] is False
    assert build(engine, rebuild.generation.spec).id != rebuild.generation.id, (
        "what its canary has found unfit is built anew"
    )


@pytest.mark.parametrize(("code", "is_good"), [(EMPTY_TEXT, True), (ENCODING_FAILED, False)])
def test_a_text_that_no_model_can_encode_is_no_fault_of_the_generation(
    engine: Engine, code: str, is_good: bool
) -> None:
    put(engine, "old")
    encode_all(engine)
    rebuild = Rebuild(engine, ITEMS, options={"canary_sample": 0})
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        complete(engine, claimed, {0: ItemFailure(code, "so it is")})
    if is_good:
        check_generation(rebuild.context())
    else:
        with pytest.raises(CanaryFailed, match=r"8 items could not be encoded, among them 'k0' \(encoding_f"):
            check_generation(rebuild.context())


def test_the_canary_waits_for_puts_that_the_new_model_has_not_encoded(
    engine: Engine, rebuild: Rebuild
) -> None:
    put(engine, "late")
    first, second = (claim(engine, each.chunk_id) for each in dispatch_all(engine))
    assert first is not None
    assert second is not None
    original, twin = (first, second) if first.spec != NEXT else (second, first)
    complete(engine, original)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            complete(engine, twin)

    rebuild.run = _with_options(rebuild, canary_sample=0)
    check_generation(rebuild.context(), wait)
    assert len(waits) == 3


def _with_options(rebuild: Rebuild, **options: Any) -> Any:
    return replace(rebuild.run, options=options)


def test_an_index_that_finds_too_little_fails_the_canary(engine: Engine, rebuild: Rebuild) -> None:
    table = table_of(rebuild.generation)
    execute(engine, f"CREATE INDEX ON {table} USING hnsw (embedding halfvec_cosine_ops)")
    rebuild.run = _with_options(rebuild, canary_sample=0, least_recall=1.01)
    with pytest.raises(
        CanaryFailed,
        match=r"finds 100.0% .* less than 101.0%: repeat the run with `--least-recall 1`",
    ):
        check_generation(rebuild.context())


@pytest.mark.parametrize("spec", [BITS])
def test_bits_are_compared_as_bits(engine: Engine, spec: EncodingSpec) -> None:
    put(engine, "old")
    encode_all(engine)
    rebuild = Rebuild(engine, ITEMS, spec)
    encode_all(engine)
    with encoding_meanwhile(engine):
        check_generation(rebuild.context())
    assert rebuild.reports["checking"]["texts"]["smallest"] == 1.0


def test_a_cancelled_run_does_not_wait_for_its_canary(engine: Engine, rebuild: Rebuild) -> None:
    put(engine, "late")
    claimed = [claim(engine, each.chunk_id) for each in dispatch_all(engine)]
    for each in claimed:
        if each is not None and each.spec != NEXT:
            complete(engine, each)

    with pytest.raises(RunCancelled):
        check_generation(rebuild.context(_raise(RunCancelled())))


def _raise(error: Exception) -> Callable[[], None]:
    def check() -> None:
        raise error

    return check


def test_a_source_that_was_sent_in_part_makes_no_new_generation(engine: Engine, rebuild: Rebuild) -> None:
    rebuild.run = _with_options(rebuild, is_complete=False)
    encode_all(engine)
    with pytest.raises(CanaryFailed, match="was not sent completely"):
        check_generation(rebuild.context())


@pytest.mark.parametrize("what", ["cancelled", "lost"])
def test_a_run_that_was_cancelled_or_lost_since_its_last_look_makes_nothing_live(
    engine: Engine, rebuild: Rebuild, what: str
) -> None:
    run_id = start_run(engine)
    claim = ask(engine, claim_run, "somebody", 30.0)
    assert claim is not None
    if what == "cancelled":
        ask(engine, cancel_run, run_id)
    else:
        execute(engine, "UPDATE vectormill.runs SET lease_until = now()")
        assert ask(engine, claim_run, "another", 30.0) is not None
    encode_all(engine)
    context = replace(rebuild.context(), hold=lambda connection: hold_run(connection, claim[0]))
    with pytest.raises(RunCancelled if what == "cancelled" else LeaseLost):
        swap(context)
    assert ask(engine, find_building, "docs") == rebuild.generation


def claim_by_spec(engine: Engine) -> tuple[list[Claim], list[Claim]]:
    """Claims of what waits: of the live generation's chunks, and of the twins'."""
    claims = [claimed for each in dispatch_all(engine) if (claimed := claim(engine, each.chunk_id))]
    return [each for each in claims if each.spec != NEXT], [each for each in claims if each.spec == NEXT]


def test_the_rows_of_a_job_that_is_still_running_are_no_failure(engine: Engine, rebuild: Rebuild) -> None:
    encode_all(engine)
    put(engine, *(f"bulk{number}" for number in range(8)), chunk_max_items=4)
    originals, _ = claim_by_spec(engine)
    complete(engine, originals[0])
    rebuild.run = _with_options(rebuild, canary_sample=0)
    check_generation(rebuild.context(), _waiting_too_long)
    assert rebuild.reports["checking"]["coverage"]["num_missing_puts"] == 0


def test_puts_that_never_pause_do_not_keep_a_generation_from_its_canary(
    engine: Engine, rebuild: Rebuild
) -> None:
    encode_all(engine)
    behind: list[Claim] = []

    def put_one_more(_: float = 0.0) -> None:
        """Ends a put in the live generation, and the twin of the put before."""
        assert len(waits) < 20, "the canary waits for puts that came after it had begun"
        waits.append(put(engine, f"put{len(waits)}"))
        originals, twins = claim_by_spec(engine)
        for each in [*originals, *behind]:
            complete(engine, each)
        behind[:] = twins

    waits: list[object] = []
    put_one_more()
    rebuild.run = _with_options(rebuild, canary_sample=0)
    check_generation(rebuild.context(), put_one_more)
    assert len(waits) == 2


def test_puts_that_never_pause_do_not_keep_a_generation_from_its_swap(
    engine: Engine, rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "DRAIN_SECONDS", 0.0)
    encode_all(engine)
    behind: list[Claim] = []
    now = 0.0

    def go_on(seconds: float = 0.0) -> None:
        """Puts one more, ends what the live model has in hand, and the twins that it had in hand before."""
        nonlocal now
        now += seconds
        put(engine, f"put{now}")
        originals, twins = claim_by_spec(engine)
        for each in [*originals, *behind]:
            complete(engine, each)
        behind[:] = twins

    go_on()
    swap(rebuild.context(), go_on, lambda: now)
    assert rebuild.reports["swapping"]["live"] == rebuild.generation.id
    assert now < PATIENCE_SECONDS / 10
    for each in behind:
        complete(engine, each)
    encode_all(engine)
    states = execute(engine, "SELECT DISTINCT state FROM vectormill.jobs").scalars().all()
    assert states == ["completed"]
    assert len([key for key in rows_of(engine, "docs") if key.startswith("put")]) == 2 * now + 1


def test_a_swap_holds_nothing_back_while_its_twins_do_not_advance(
    engine: Engine, rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "DRAIN_SECONDS", 0.0)
    encode_all(engine)
    now = 0.0

    def go_on(seconds: float = 0.0) -> None:
        nonlocal now
        now += max(seconds, 30.0)
        put(engine, f"put{now}")
        originals, _ = claim_by_spec(engine)
        assert len(originals) == 1, "a put waits for a model that has no worker"
        complete(engine, originals[0])

    go_on()
    with pytest.raises(SwapRefused, match="check that its workers keep up"):
        swap(rebuild.context(), go_on, lambda: now)


def _waiting_too_long(_: float) -> None:
    raise AssertionError("the canary waits for a job that has not ended")
