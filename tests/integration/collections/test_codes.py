"""Collections that keep multi-vectors as residual codes: how rows become codes, and what reads them. Real Postgres."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from indexer.indexing import build_indexes
from scheduler.index_maintainer import IndexMaintainer
from tests.api_server import api_client
from tests.building import encode_all
from tests.database import ask
from tests.indexed import execute, start_run
from tests.integration.collections.test_kinds import select
from tests.integration.search.test_search_outputs import search
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC, make_items, submit
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.collections.bulk_loads import begin_bulk_load, copy_rows
from vectormill.collections.codebooks import find_codebook, keep_codebook, open_kind
from vectormill.collections.collection import CollectionOptions, Generation
from vectormill.collections.collections import create_collection, find_generation
from vectormill.collections.exports import Inclusion, read_pages
from vectormill.collections.generation_tables import upsert_rows
from vectormill.collections.items import find_item
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CodebookMissing, InvalidOption, LeaseLost
from vectormill.domain.task import DENSE, MULTI_VECTOR
from vectormill.jobs.item import Items
from vectormill.problems import ApiError
from vectormill.results.kind import take_objects
from vectormill.runs.samples import compare_results
from vectormill.search.late_interaction import measure_maxsim
from vectormill.settings import Settings
from vectormill.vectors.representations import Representations, unpack
from vectormill.vectors.residual_codes import measure_codebook, restore

CODED = CollectionOptions(index_options={"multi_vector_codes": 2})
FIRST, LATER = make_items(60), make_items(20, "later")
QUERY = representations_of(b"a query")
OTHER = measure_codebook(np.random.default_rng(1).standard_normal((100, 4)).astype(np.float32))
COUNT_FORMS = "SELECT count(multi_vector), count(multi_vector_codes) FROM vectormill.generation_1"


@pytest.fixture(autouse=True)
def few_rows_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.indexing.LEAST_ROWS", 50)
    monkeypatch.setattr("vectormill.vectors.representations._DIMENSIONS_AT_ONCE", 28)  # seven rows at once


def keep(engine: Engine, items: Any = FIRST, spec: EncodingSpec = MANY) -> Generation:
    """Put items into `docs`, which wants codes; return its generation, of which no run knows yet."""
    ask(engine, create_collection, "docs", spec, CODED, 100)
    put(engine, items, spec)
    return ask(engine, find_generation, "docs")


def put(engine: Engine, items: Any, spec: EncodingSpec = MANY) -> None:
    submit(engine, items, collection="docs", spec=spec, chunk_max_items=30)
    encode_all(engine)


def run_index(engine: Engine, generation: Generation, check: Callable[[], None] = lambda: None) -> Any:
    context, report = start_run(engine, options={"only_codes": True}, check=check)
    build_indexes(context, generation)
    return report


def restored_of(engine: Engine, items: Any) -> dict[str, np.ndarray]:
    """Return the token vectors by key that the codes of the items' own vectors stand for."""
    codebook = ask(engine, find_codebook, MANY)
    assert codebook is not None
    return {
        item.key: restore(codebook.encode([representations_of(item.text).vectors])[0], codebook)
        for item in items
    }


def exported(engine: Engine) -> dict[str, Representations]:
    generation = ask(engine, find_generation, "docs")
    return {
        key: unpack(packed)
        for page in read_pages(engine, generation, Inclusion())
        for key, packed in zip(
            page.keys, page.results.tolist() if page.results is not None else [], strict=True
        )
    }


def test_a_run_turns_halves_into_codes_and_later_rows_are_codes_at_once(engine: Engine) -> None:
    generation = keep(engine)
    assert select(engine, COUNT_FORMS) == [(60, 0)]
    report = run_index(engine, generation)
    assert report["codes"]["num_rows"] == 60
    put(engine, LATER)
    assert select(engine, COUNT_FORMS) == [(0, 80)]
    ((digest,),) = select(engine, "SELECT digest FROM vectormill.codebooks")
    heads = select(engine, "SELECT DISTINCT substring(multi_vector_codes FOR 8) FROM vectormill.generation_1")
    assert heads == [(digest,)]
    assert report["codes"]["codebook"] == digest.hex()
    found = exported(engine)
    restored = restored_of(engine, [*FIRST, *LATER])
    assert found.keys() == restored.keys()
    for item in (*FIRST, *LATER):
        np.testing.assert_allclose(found[item.key].vectors, restored[item.key], rtol=1e-3, atol=1e-3)
        expected = replace(representations_of(item.text), vectors=found[item.key].vectors)
        assert found[item.key].pack() == expected.pack(), "dense and sparse stay as they are"
    results = ask(engine, find_item, "docs", "later3", has_vector=True).results
    assert results is not None
    assert results[0] == found["later3"].pack()


def test_a_codebook_is_measured_once_for_a_space(engine: Engine) -> None:
    run_index(engine, keep(engine))
    before = select(engine, "SELECT * FROM vectormill.codebooks")
    put(engine, LATER)
    run_index(engine, ask(engine, find_generation, "docs"))
    ask(engine, keep_codebook, MANY, OTHER)  # of another indexer at the same time
    assert select(engine, "SELECT * FROM vectormill.codebooks") == before
    # The multi-vectors of another collection are of the same space, whatever its other outputs are.
    assert ask(engine, find_codebook, MANY.narrow([MULTI_VECTOR])) is not None
    assert ask(engine, find_codebook, replace(MANY, revision="2")) is None


def test_few_rows_keep_halves(engine: Engine) -> None:
    generation = keep(engine, FIRST[:40])
    assert "too few tokens" in run_index(engine, generation)["codes"]["because"]
    assert select(engine, COUNT_FORMS) == [(40, 0)]


def test_a_collection_that_does_not_ask_for_codes_keeps_halves(engine: Engine) -> None:
    ask(engine, keep_codebook, MANY, OTHER)
    generation = keep(engine)
    execute(engine, "UPDATE vectormill.collections SET index_options = '{\"multi_vector_codes\": 0}'")
    put(engine, LATER)
    assert select(engine, COUNT_FORMS) == [(20, 60)]
    assert run_index(engine, generation).get("codes") is None
    assert select(engine, COUNT_FORMS) == [(20, 60)]


def test_a_search_compares_what_codes_stand_for(engine: Engine) -> None:
    generation = keep(engine)
    run_index(engine, generation)
    query = QUERY.vectors.astype(np.float32)
    restored = restored_of(engine, FIRST)
    scores = {key: float(measure_maxsim(query, [vectors])[0]) for key, vectors in restored.items()}
    best = sorted(scores, key=lambda key: -scores[key])
    for outputs in ((MULTI_VECTOR,), (DENSE, MULTI_VECTOR)):
        matches = search(engine, outputs=outputs, limit=10)
        assert [match["key"] for match in matches] == best[:10]
        assert [match["score"] for match in matches] == pytest.approx(
            [scores[key] for key in best[:10]], rel=1e-4
        )
    assert search(engine, None, outputs=(MULTI_VECTOR,), like="k7", limit=3)


def test_a_search_of_all_rows_takes_the_same_memory_for_more_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vectormill.vectors.representations._DIMENSIONS_AT_ONCE", 400
    )  # a hundred rows at once
    peaks = []
    keep(engine, make_items(400))
    for number in (1, 2):
        tracemalloc.start()
        search(engine, outputs=(MULTI_VECTOR,), limit=10)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        if number == 1:
            put(engine, make_items(1200, "more"))
    # All rows at once would be sixteen times as many; other objects differ by a fifth.
    assert peaks[1] < 2 * peaks[0]


def test_a_run_that_was_ended_goes_on_where_it_was(engine: Engine) -> None:
    generation = keep(engine)

    def lose() -> None:
        raise LeaseLost

    with pytest.raises(LeaseLost):
        run_index(engine, generation, check=lose)
    assert select(engine, COUNT_FORMS) == [(53, 7)]
    assert run_index(engine, generation)["codes"]["num_rows"] == 53
    assert select(engine, COUNT_FORMS) == [(0, 60)]


def test_a_row_that_somebody_writes_is_not_waited_for(engine: Engine) -> None:
    generation = keep(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.generation_1 SET job_seq = job_seq WHERE key = 'k7'"))
        assert run_index(engine, generation)["codes"]["num_rows"] == 59
    assert select(engine, COUNT_FORMS) == [(1, 59)]
    assert len(exported(engine)) == 60


def test_halves_of_a_process_without_codes_count_and_it_cannot_lose_codes(engine: Engine) -> None:
    generation = keep(engine)
    run_index(engine, generation)
    newer = representations_of(b"newer").vectors
    halves = ",".join(f"'{row}'" for row in newer.tolist())
    execute(
        engine,
        f"UPDATE vectormill.generation_1 SET multi_vector = ARRAY[{halves}]::halfvec[] WHERE key = 'k7'",
    )
    assert select(engine, COUNT_FORMS) == [(1, 60)]
    np.testing.assert_array_equal(exported(engine)["k7"].vectors, newer)
    assert search(engine, replace(QUERY, vectors=newer), outputs=(MULTI_VECTOR,), limit=1)[0]["key"] == "k7"
    copied = (
        "INSERT INTO vectormill.generation_1 (key, content_hash, embedding, sparse, multi_vector, job_seq)"
    )
    with pytest.raises(IntegrityError, match="check constraint"):
        execute(
            engine,
            f"{copied} SELECT 'copy', content_hash, embedding, sparse, multi_vector, job_seq "
            "FROM vectormill.generation_1 WHERE key = 'k8'",
        )


@pytest.mark.parametrize(
    "loss",
    [
        "DELETE FROM vectormill.codebooks",
        "UPDATE vectormill.codebooks SET digest = '\\x0102030405060708', content = :content",
    ],
    ids=["missing", "another"],
)
def test_codes_without_their_codebook_are_an_error_that_says_so(engine: Engine, loss: str) -> None:
    run_index(engine, keep(engine))
    ((digest,),) = select(engine, "SELECT digest FROM vectormill.codebooks")
    with engine.begin() as connection:
        connection.execute(text(loss), {"content": OTHER.to_bytes()} if ":" in loss else {})
    for act in (lambda: exported(engine), lambda: search(engine, outputs=(MULTI_VECTOR,))):
        with pytest.raises(CodebookMissing, match=digest.hex()):
            act()
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        with pytest.raises(ApiError, match=r"re-index the collection") as refused:
            client.search("docs", more_like="k1", outputs=["multi_vector"])
        assert refused.value.status == 409


def test_copied_codes_are_those_that_an_upsert_writes(engine: Engine) -> None:
    ask(engine, keep_codebook, MANY, OTHER)
    generation = keep(engine, FIRST[:1])
    items = Items.of(LATER)
    results = take_objects([representations_of(item.text).pack() for item in LATER])
    with engine.begin() as connection:
        begin_bulk_load(connection, generation, submit(engine, FIRST[:1], spec=SPEC).id)
        upsert_rows(connection, generation.id, 2, items, results, MANY)
        driver = connection.connection.driver_connection
        assert driver is not None
        with driver.cursor() as cursor:
            copy_rows(cursor, generation.id, 2, items, results, MANY, keep_text=False)
    rows = "SELECT CAST(row AS text) FROM vectormill.{} AS row WHERE key LIKE 'later%' ORDER BY key"
    copied = select(engine, rows.format("generation_1_fill"))
    assert copied == select(engine, rows.format("generation_1"))
    assert len(copied) == 20
    assert select(engine, "SELECT count(multi_vector_codes) FROM vectormill.generation_1_fill") == [(20,)]


def test_a_check_tells_coded_rows_from_those_of_other_texts(engine: Engine) -> None:
    generation = keep(engine)
    numbers = np.random.default_rng(2)
    tokens = numbers.standard_normal((4000, 32)).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    codebook = measure_codebook(tokens[1000:])
    own = Representations(dense=tokens[0], vectors=tokens[:5].astype(np.float16))
    kept = replace(own, vectors=restore(codebook.encode([own.vectors])[0], codebook).astype(np.float16))
    turned = replace(own, vectors=tokens[5:10].astype(np.float16))
    other = replace(own, dense=tokens[1])
    results = take_objects([each.pack() for each in (kept, turned, other)])
    now = take_objects([own.pack()] * 3)
    agreement, least = compare_results(generation.spec, results, now, None, has_codes=True)
    assert (agreement >= least).tolist() == [True, False, False]
    strictly, _ = compare_results(generation.spec, results, now, None)
    assert (strictly >= least).tolist() == [False, False, False]


def test_the_maintainer_asks_for_a_codebook_once_there_are_enough_rows(engine: Engine) -> None:
    keep(engine, make_items(1000))
    execute(engine, "UPDATE vectormill.collections SET index_policy = 'none'")
    duty = IndexMaintainer(engine, Settings())
    wait_for(lambda: duty.tend() == 1)  # Postgres counts rows with a delay
    ((options,),) = select(engine, "SELECT options FROM vectormill.runs")
    assert options["only_codes"]
    execute(engine, "UPDATE vectormill.runs SET state = 'completed', finished_at = now()")
    run_index(engine, ask(engine, find_generation, "docs"))
    assert duty.tend() == 0


def test_codes_are_asked_for_over_http(engine: Engine) -> None:
    with engine.begin() as connection:
        create_collection(connection, "docs", MANY, CollectionOptions(), 100)
        create_collection(connection, "dense", SPEC, CollectionOptions(), 100)
        with pytest.raises(InvalidOption, match="multi_vector_codes needs the output multi_vector"):
            create_collection(connection, "more", SPEC, CODED, 100)
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        client.set_index("docs", multi_vector_codes=2)
        assert client.index("docs")["options"] == {"multi_vector_codes": 2}
        with pytest.raises(ApiError, match="'dense' has dense"):
            client.set_index("dense", multi_vector_codes=2)
        with pytest.raises(ApiError, match="multi_vector_codes"):
            client.set_index("docs", multi_vector_codes=4)
    put(engine, FIRST)
    ask(engine, keep_codebook, MANY, OTHER)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert open_kind(driver, MANY, 1).writes_codes  # type: ignore[attr-defined]
