"""Messages of queries, and which of them go together: read as they were written, and nothing else is taken for one."""

import asyncio
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine

from api.metrics import QueryMetrics
from api.queries import (
    KNOWN_SECONDS,
    MAX_TEXTS,
    Message,
    MessageLost,
    QueryExchange,
    count_fitting,
    cut_parts,
    split_answer,
)
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC
from tests.queries import SIGNER
from vectormill.broker.queries import (
    Answer,
    EncodedTexts,
    NotEncoded,
    Query,
    QueryAccepted,
    QueryProducer,
    Signer,
    UnreadableMessage,
    name_space,
    read_answer,
    read_pulse,
    read_query,
    read_spec,
    write_answer,
    write_query,
    write_spec,
)
from vectormill.models.registry import Registry
from vectormill.search.search import Deadline
from vectormill.settings import Settings

QUERY = Query(b"8 bytes.", "answers", 1234, 1000, write_spec(SPEC), [b"text", "zwölf".encode()]).sign(SIGNER)

NOWHERE = "redis://127.0.0.1:1"


def read_own(message: bytes, query: Query = QUERY, signer: Signer = SIGNER) -> Answer | None:
    return read_answer(message, {query.id: query.signature}.get, signer)


def test_a_query_arrives_as_it_was_written() -> None:
    assert read_query(write_query(QUERY), SIGNER) == QUERY
    assert read_spec(QUERY.spec) == SPEC


def test_the_texts_come_after_the_first_128_bytes_which_redis_keeps_of_a_slow_command() -> None:
    assert write_query(QUERY).index(b"zw") > 128


ANSWERS: list[Answer] = [
    QueryAccepted(QUERY.id, "worker"),
    EncodedTexts(QUERY.id, 2, np.ones((2, 2), dtype="<f4").tobytes(), {1: "empty"}, b"\0" * 8, [0]),
    NotEncoded(QUERY.id, "stopped"),
]


def test_an_answer_arrives_as_it_was_written() -> None:
    for answer in ANSWERS:
        assert read_own(write_answer(QUERY, answer, SIGNER)) == answer


def test_what_is_no_message_is_refused() -> None:
    cases: list[bytes] = [b"", b"\x01", b"\x03\x90", b"\x01\xc0", b"\x01" + b"\xff" * 20, b"{}"]
    for message in cases:
        for read in (lambda it: read_query(it, SIGNER), read_own, read_pulse):
            with pytest.raises(UnreadableMessage):
                read(message)


def test_a_message_of_a_later_release_may_have_more() -> None:
    longer = b"\x01" + bytes([write_query(QUERY)[1] + 1]) + write_query(QUERY)[2:] + b"\xa3new"
    assert read_query(longer, SIGNER) == QUERY


def test_no_message_is_taken_that_differs_in_any_way_from_what_was_signed() -> None:
    stranger = Signer(bytes(32))
    for field, value in (
        ("id", b"7 bytes"),
        ("answers", "another"),
        ("expires_at", 9999),
        ("max_text_chars", 1),
        ("spec", b"{}"),
        ("texts", [b"text", b"zw"]),
        ("traceparents", ["another"]),
        ("signature", bytes(32)),
    ):
        with pytest.raises(UnreadableMessage, match="the key of this installation"):
            read_query(write_query(msgspec.structs.replace(QUERY, **{field: value})), SIGNER)
    with pytest.raises(UnreadableMessage, match="the key of this installation"):
        read_query(write_query(QUERY.sign(stranger)), SIGNER)
    with pytest.raises(UnreadableMessage, match="no signature"):
        read_query(write_query(msgspec.structs.replace(QUERY, signature=b"")), SIGNER)
    other = msgspec.structs.replace(QUERY, texts=[b"other"]).sign(SIGNER)
    for answer in ANSWERS:
        true = write_answer(QUERY, answer, SIGNER)
        for forged in (
            write_answer(QUERY, answer, stranger),
            write_answer(other, answer, SIGNER),  # the answer to another query, under the id of this one
            *(true[:at] + bytes([true[at] ^ 1]) + true[at + 1 :] for at in range(9, len(true))),
            *(true[:end] for end in range(9, len(true))),
            true + b"\0",
        ):
            with pytest.raises(UnreadableMessage, match="the key of this installation"):
                read_own(forged)
        unsigned = write_answer(msgspec.structs.replace(QUERY, signature=b""), answer, SIGNER)
        with pytest.raises(UnreadableMessage, match="no signature"):
            read_own(unsigned)
        assert read_answer(true, lambda _: None, SIGNER) is None, "its client has gone"


def test_processes_of_the_release_before_are_understood_while_an_upgrade_lasts() -> None:
    upgrading = Signer(SIGNER.key, time.monotonic() + 60)
    old = msgspec.structs.replace(QUERY, signature=b"")
    assert read_query(write_query(old), upgrading) == old
    for answer in ANSWERS:
        unsigned = write_answer(old, answer, upgrading)
        assert unsigned == b"\x01" + msgspec.msgpack.encode(answer), "an old API reads it"
        assert read_own(unsigned, signer=upgrading) == answer


def test_workers_with_another_model_share_no_queue() -> None:
    spaces = [("m", "1", "mean"), ("m", "2", "mean"), ("m", "1", "cls"), ("m1", "", "mean")]
    assert len({name_space(*space) for space in spaces}) == len(spaces)


def test_so_many_clients_go_into_one_message() -> None:
    cases: list[tuple[list[int], int]] = [
        ([1] * 3, 3),
        ([1] * (MAX_TEXTS + 5), MAX_TEXTS),
        ([MAX_TEXTS - 1, 2, 1], 1),  # the order of clients is kept
        ([100, 1], 1),  # one client's texts are never divided
    ]
    for sizes, together in cases:
        assert count_fitting(SPEC, [[b"text"] * size for size in sizes]) == together


def test_large_texts_go_by_themselves() -> None:
    assert count_fitting(SPEC, [[b"t" * 700_000] for _ in range(4)]) == 1


def test_clients_whose_vectors_of_tokens_fill_an_answer_do_not_go_together() -> None:
    wide = replace(MANY, token_dimensions=1024)
    clients = [next(cut_parts(wide, [b"t" * 20_000] * 4)) for _ in range(3)]
    assert count_fitting(wide, clients) == 1
    assert count_fitting(SPEC, clients) == 3


def test_each_client_gets_its_rows_and_the_reason_of_its_own_failure() -> None:
    together = (2, 1, 1)
    values = np.arange(8, dtype="<f4").reshape(4, 2)
    counts = np.array([3, 4, 0, 5], dtype="<i4").tobytes()
    for wrong in (
        EncodedTexts(b"", 2, values.tobytes()[:-4], {}, counts, []),
        EncodedTexts(b"", 0, b"", {}, counts, []),
        EncodedTexts(b"", 2, values.tobytes(), {}, counts[:-4], []),
    ):
        with pytest.raises(MessageLost):
            split_answer(wrong, together)
    answer = EncodedTexts(b"", 2, values.tobytes(), {2: "the text is empty"}, counts, [1, 3])
    first, second, third = split_answer(answer, together)
    assert first.vectors.tolist() == [[0, 1], [2, 3]]
    assert third.vectors.tolist() == [[6, 7]]
    assert [each.failures.tolist() for each in (first, second, third)] == [
        [None, None],
        ["the text is empty"],
        [None],
    ]
    assert [each.num_tokens for each in (first, second, third)] == [7, 0, 5]
    assert [each.is_truncated.tolist() for each in (first, second, third)] == [[False, True], [False], [True]]


def make_exchange() -> QueryExchange:
    return QueryExchange(
        Settings(redis_url=NOWHERE),
        create_engine("postgresql+psycopg://nowhere/nothing"),
        Registry({}),
        QueryMetrics(CollectorRegistry()),
        lambda: False,
    )


def test_a_message_whose_clients_have_all_gone_is_posted_no_more() -> None:
    async def run() -> None:
        exchange = make_exchange()
        exchange._producer = QueryProducer(NOWHERE, SIGNER)
        first, second = (
            asyncio.create_task(exchange.answer(SPEC, {"/text": b"text"}, Deadline(60))) for _ in range(2)
        )
        async with asyncio.timeout(30):
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.sleep(0.05)
            assert exchange._coalescer.num_running == 1
            second.cancel()
            await exchange._coalescer.close()
        await exchange._producer.close()

    asyncio.run(run())


def test_more_messages_are_at_work_with_more_workers_that_answer() -> None:
    async def run() -> None:
        exchange = make_exchange()
        assert exchange._max_messages("space") == 2
        exchange._takers["space", "old"] = time.monotonic() - KNOWN_SECONDS - 5
        for worker in ("a", "b"):
            exchange._take(Message(QUERY, "space", b""), QueryAccepted(QUERY.id, worker))
        assert exchange._max_messages("space") == 4
        assert exchange._max_messages("other") == 2
        assert exchange._takers.keys() == {("space", "a"), ("space", "b")}

    asyncio.run(run())


def test_representations_are_split_as_they_were_sent_and_an_answer_of_another_size_is_lost() -> None:
    rows = [representations_of(text) for text in (b"one", b"two")]
    packed = [rows[0].pack(), b"", rows[1].pack()]
    sizes = np.array([len(row) for row in packed], "<i4")
    counts = np.array([3, 0, 5], "<i4").tobytes()
    answer = EncodedTexts(
        QUERY.id, 0, b"".join(packed), {1: "the text is empty"}, counts, [], sizes.tobytes()
    )
    assert read_own(write_answer(QUERY, answer, SIGNER)) == answer
    first, second = split_answer(answer, [2, 1])
    assert first.vectors[1] is None
    assert first.failures.tolist() == [None, "the text is empty"]
    for found, expected in ((first.vectors[0], rows[0]), (second.vectors[0], rows[1])):
        np.testing.assert_array_equal(found.vectors, expected.vectors)
        np.testing.assert_array_equal(found.indices, expected.indices)
    for broken in (sizes[:2], sizes + 4, np.array([len(packed[0]) + 2, 0, len(packed[2]) - 2], "<i4")):
        with pytest.raises(MessageLost, match="wrong length"):
            split_answer(msgspec.structs.replace(answer, sizes=broken.tobytes()), [3])
