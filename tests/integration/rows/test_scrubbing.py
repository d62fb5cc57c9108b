"""Deleting leaves no text behind: what is scrubbed from payloads, when, and what is waited for."""

import pytest
from sqlalchemy import Engine, text

from scheduler import scrubber
from scheduler.pruner import Pruner
from scheduler.scrubber import Scrubber
from tests.database import ask, execute
from tests.integration.rows.test_items import delete, read_keys
from tests.protocol import SPEC, claim, claim_next, complete, dispatch_all, make_items, submit
from tests.residue import find_residue
from tests.waiting import wait_for
from vectormill.collections.collections import find_generation
from vectormill.collections.items import remove_items
from vectormill.collections.removals import remove_collection, stop_work
from vectormill.collections.tombstones import Pass, delete_scrubbed, find_pass, finish_pass
from vectormill.domain.errors import LeaseLost
from vectormill.jobs.chunk import decode_payload, empty_items, encode_payload
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.export import read_results
from vectormill.jobs.item import Item, ItemFailure
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import draw_seq, retry_job
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

SECRET, METADATA = "a confession", '{"by": "a named person"}'
FAILURE = ItemFailure("encoding_failed", "so it is")


def secret_items(count: int = 4) -> list[Item]:
    """The first of them is to be forgotten."""
    return [Item("k", SECRET.encode(), METADATA.encode()), *make_items(count - 1, "other")]


def write(engine: Engine, items: list[Item], failures: dict[int, ItemFailure] | None = None) -> Job:
    job = submit(engine, items, collection="docs")
    while not complete(engine, claim_next(engine), failures):
        pass
    return job


def scrub(engine: Engine) -> None:
    Scrubber(engine).scrub(lambda: False)


def residue(engine: Engine) -> list[str]:
    return find_residue(engine, SECRET) + find_residue(engine, "a named person")


def count_unscrubbed(engine: Engine) -> int:
    with engine.connect() as connection:
        statement = "SELECT count(*) FROM vectormill.tombstones WHERE scrubbed_at IS NULL"
        return int(connection.execute(text(statement)).scalar_one())


def test_the_items_of_a_payload_are_emptied_by_key_and_others_stay_as_they_were() -> None:
    items = secret_items(3)
    blob, number = empty_items(encode_payload(items), {"k", "never there"})
    assert blob is not None
    assert (number, list(decode_payload(blob))) == (1, [Item("k", b""), *items[1:]])
    assert empty_items(blob, {"k"}) == (None, 0)


def test_no_byte_of_a_deleted_text_is_left_in_any_table(engine: Engine) -> None:
    write(engine, secret_items(9))  # three chunks
    write(engine, [Item("k", SECRET.encode())])
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    write(engine, secret_items(2))
    assert set(residue(engine)) == {"vectormill.chunk_payloads", "vectormill.generation_1_attributes"}
    delete(engine, "k")
    assert set(residue(engine)) == {"vectormill.chunk_payloads"}
    scrub(engine)
    assert residue(engine) == []
    assert count_unscrubbed(engine) == 0
    kept = {"vectormill.chunk_payloads", "vectormill.generation_1_attributes"}
    assert set(find_residue(engine, "text other 0")) == kept


def test_the_pruner_of_a_scheduler_scrubs(engine: Engine) -> None:
    write(engine, secret_items())
    delete(engine, "k")
    with Pruner(engine, 1e9, 1e9):
        wait_for(lambda: not residue(engine), 10, "the text is gone")


def test_what_was_put_after_the_deletion_stays(engine: Engine) -> None:
    write(engine, secret_items())
    delete(engine, "k")
    write(engine, [Item("k", b"something harmless")])
    scrub(engine)
    assert residue(engine) == []
    assert set(find_residue(engine, "something harmless")) == {"vectormill.chunk_payloads"}
    assert "row k" in read_keys(engine)


def test_a_job_that_is_at_work_is_waited_for(engine: Engine) -> None:
    submit(engine, secret_items(), collection="docs")
    write_nothing_yet = claim_next(engine)
    delete(engine, "k")
    scrub(engine)
    assert residue(engine), "its worker may hold it, and a retry needs the payload's other items"
    assert count_unscrubbed(engine) == 1
    complete(engine, write_nothing_yet)
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)
    assert read_keys(engine) == {"row other0", "row other1", "row other2"}


def test_an_upload_that_began_before_the_deletion_is_waited_for(engine: Engine) -> None:
    write(engine, make_items(1))
    settings = Settings(chunk_max_items=1)
    with JobWriter(engine, NewJob(SPEC, collection="docs"), settings) as writer:
        for item in secret_items(9):
            writer.add(item)  # eight chunks are a part, which is written
        delete(engine, "k")
        scrub(engine)
        assert count_unscrubbed(engine) == 1
        writer.finish()
    scrub(engine)
    assert residue(engine)
    while True:
        if complete(engine, claim_next(engine)):
            break
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)
    assert "row k" not in read_keys(engine)


def test_an_upload_to_another_collection_is_not_waited_for(engine: Engine) -> None:
    submit(engine, make_items(1), collection="other")
    complete(engine, claim_next(engine))
    write(engine, secret_items())
    with JobWriter(engine, NewJob(SPEC, collection="other"), Settings(chunk_max_items=1)) as writer:
        for item in make_items(9):
            writer.add(item)  # eight chunks are a part, which is written
        delete(engine, "k")
        scrub(engine)
        assert (residue(engine), count_unscrubbed(engine)) == ([], 0)
        # Its collection can be deleted, and is created again at its end.
        stop_work(engine, "other")
        remove_collection(engine, "other")
        assert writer.finish().collection == "other"


def test_a_transaction_that_began_before_the_deletion_is_waited_for(engine: Engine) -> None:
    write(engine, secret_items())
    with engine.begin() as connection:
        connection.execute(text("SELECT 1"))  # it may have drawn an older place among the writers
        delete(engine, "k")
        scrub(engine)
        assert count_unscrubbed(engine) == 1
    scrub(engine)
    assert count_unscrubbed(engine) == 0


@pytest.mark.parametrize("is_scrubbed", [False, True])
def test_a_retry_does_not_bring_a_deleted_item_back(engine: Engine, is_scrubbed: bool) -> None:
    job = write(engine, secret_items(), {0: FAILURE, 1: FAILURE})
    delete(engine, "k")
    if is_scrubbed:
        scrub(engine)
    ask(engine, retry_job, job.id)
    assert complete(engine, claim_next(engine))
    assert read_keys(engine) == {"row other0", "row other1", "row other2"}
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)


def test_a_deleted_item_is_missing_in_the_export_of_its_job(engine: Engine) -> None:
    job = write(engine, secret_items())
    delete(engine, "k")
    for _ in range(2):  # before and after
        (block,) = read_results(engine, job.id)
        assert (block.keys[0], block.present.tolist()) == ("k", [False, True, True, True])
        scrub(engine)


def test_a_chunk_that_was_split_is_scrubbed_in_its_halves(engine: Engine) -> None:
    submit(engine, secret_items(), collection="docs")
    claimed = claim_next(engine)
    ask(engine, split_chunk, claimed, "lost twice")
    while not complete(engine, claim_next(engine)):
        pass
    delete(engine, "k")
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)


def test_a_pass_that_was_broken_off_is_made_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    write(engine, [*make_items(40), *secret_items()])
    delete(engine, "k", "k0")
    monkeypatch.setattr(scrubber, "ROUND_SECONDS", 60.0)
    stops = iter([False, True])
    Scrubber(engine).scrub(lambda: next(stops))  # killed after its first payloads
    assert residue(engine)
    assert count_unscrubbed(engine) == 2
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)


def test_a_removal_in_an_earlier_place_waits_for_the_next_pass(engine: Engine) -> None:
    write(engine, [*make_items(1), *secret_items()])
    place = ask(engine, draw_seq)
    delete(engine, "k0")
    with engine.begin() as connection:
        found = find_pass(connection, 0)
        assert isinstance(found, Pass)
    with engine.begin() as connection:
        assert remove_items(connection, find_generation(connection, "docs"), ["k"], [place]) == 1
    assert ask(engine, finish_pass, found, "") == "k0"
    assert ask(engine, finish_pass, found, "k0") is None
    assert count_unscrubbed(engine) == 1
    scrub(engine)
    assert (residue(engine), count_unscrubbed(engine)) == ([], 0)


def test_tombstones_go_some_time_after_they_were_scrubbed(engine: Engine) -> None:
    write(engine, secret_items())
    delete(engine, "k")
    assert ask(engine, delete_scrubbed, -1) == 0
    scrub(engine)
    assert (ask(engine, delete_scrubbed), ask(engine, delete_scrubbed, -1)) == (0, 1)


def test_a_worker_whose_lease_went_over_to_another_brings_nothing_back(engine: Engine) -> None:
    job = submit(engine, secret_items(), collection="docs")
    (chunk_id,) = [dispatch.chunk_id for dispatch in dispatch_all(engine)]
    lost = claim(engine, chunk_id, lease_seconds=-1)
    again = claim(engine, chunk_id, "other")
    assert lost is not None
    assert again is not None
    delete(engine, "k")
    complete(engine, again)
    scrub(engine)
    with pytest.raises(LeaseLost):
        complete(engine, lost)
    assert residue(engine) == []
    assert job.num_items == 4
