"""Arrays that cross in shared memory: whole, never another batch's, and never one that was not said to be there."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.batching.budget import LARGEST_TOKENS
from worker.runner import channel as channel_module
from worker.runner.channel import NUM_BLOCKS, Channel, make_memory
from worker.runner.messages import Encode, Encoded
from worker.runner.runner import Runner

Ends = tuple[Runner, Channel]


def make_ends() -> Ends:
    """A worker's end, as a Runner without a process has it, and the process's."""
    ours, theirs = multiprocessing.Pipe()
    memory = make_memory()
    runner = object.__new__(Runner)
    runner._channel = Channel(ours, memory, is_worker=True)
    runner._free_blocks, runner._blocks = list(range(NUM_BLOCKS))[::-1], {}
    process = Channel(theirs, memory, is_worker=False)
    os.close(memory)
    return runner, process


@pytest.fixture
def ends() -> Iterator[Ends]:
    runner, process = make_ends()
    with runner.connection, process.connection:
        yield runner, process


def make_batch(*rows: list[int]) -> Batch:
    return Batch.from_ids([np.array(row, np.int32) for row in rows])


def answer(process: Channel, received: tuple[Encode, int | None]) -> None:
    """Rows of other lengths than the inputs', made of them."""
    message, block = received
    rows = [
        np.repeat(row, 2) for row in np.split(message.batch.input_ids, message.batch.lengths.cumsum()[:-1])
    ]
    process.send(Encoded(message.number, Ragged.from_rows(rows, np.float64), 0.1), block)


def test_arrays_of_any_type_cross_with_the_offsets_of_their_rows(ends: Ends) -> None:
    runner, process = ends
    batch = Batch(
        {
            "input_ids": Ragged.from_rows([np.array([7, 8]), np.array([5])], np.int32),
            "token_type_ids": Ragged.from_rows([np.array([0, 1]), np.array([1])], np.int8),
        }
    )
    runner.send(Encode(1, batch, is_urgent=True))
    message, block = process.receive()
    assert (message.number, message.is_urgent) == (1, True)
    assert block is not None
    for name, rows in batch.inputs.items():
        found = message.batch.inputs[name]
        assert found.values.dtype == rows.values.dtype
        assert [found.row(i).tolist() for i in range(2)] == [rows.row(i).tolist() for i in range(2)]
    records = [np.frombuffer(text, np.uint8) for text in (b"[1]", b"", b'{"a": 2}')]
    process.send(Encoded(1, Ragged.from_rows(records, np.uint8), 0.1), block)
    (encoded,) = runner.receive()
    assert [encoded.results.row(i).tobytes() for i in range(3)] == [b"[1]", b"", b'{"a": 2}']


def test_no_array_goes_through_the_pipe_that_fits_a_block(ends: Ends) -> None:
    runner, process = ends
    runner.send(Encode(1, make_batch([1] * 100_000), is_urgent=False))
    assert len(process.connection.recv_bytes()) < 1000


def test_vectors_of_the_largest_batch_of_short_texts_fit_a_block(ends: Ends) -> None:
    runner, process = ends
    vectors = np.zeros((LARGEST_TOKENS // 16, 1024), np.float32)
    runner.send(Encode(1, make_batch([1]), is_urgent=False))
    block = process.receive()[1]
    # In a thread: through the pipe it would never end, for nobody reads.
    sending = threading.Thread(
        target=process.send, args=(Encoded(1, Ragged.from_matrix(vectors), 0.1), block), daemon=True
    )
    sending.start()
    num_bytes = len(runner.connection.recv_bytes())
    sending.join()
    assert num_bytes < 1000


def test_results_may_be_made_of_the_inputs_memory(ends: Ends) -> None:
    """As an encoder does that hands on what it was given."""
    runner, process = ends
    runner.send(Encode(1, make_batch([1, 2, 3], [4, 5]), is_urgent=False))
    message, block = process.receive()
    process.send(Encoded(1, message.batch.inputs["input_ids"].take(np.array([1, 0])), 0.1), block)
    (encoded,) = runner.receive()
    assert encoded.results.covered.tolist() == [4, 5, 1, 2, 3]


def test_what_is_larger_than_a_block_goes_through_the_pipe(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, process = ends
    monkeypatch.setattr(channel_module, "HALF_BYTES", 128)
    runner.send(Encode(1, make_batch(list(range(40))), is_urgent=False))
    message, block = process.receive()
    assert block is None
    assert message.batch.input_ids.tolist() == list(range(40))
    answer(process, (message, block))
    (encoded,) = runner.receive()
    assert encoded.results.covered.tolist() == np.repeat(np.arange(40), 2).tolist()
    assert len(runner._free_blocks) == NUM_BLOCKS


def test_a_block_is_free_when_its_results_were_dropped_and_not_before(ends: Ends) -> None:
    runner, process = ends
    runner.send(Encode(1, make_batch([1, 2]), is_urgent=False))
    answer(process, process.receive())
    gc.disable()  # nobody waits for the collector
    try:
        (encoded,) = runner.receive()
        row = encoded.results.row(1) if len(encoded.results) > 1 else encoded.results.row(0)
        del encoded
        assert len(runner._free_blocks) == NUM_BLOCKS - 1, "a part of them is held"
        del row
        assert len(runner._free_blocks) == NUM_BLOCKS
    finally:
        gc.enable()


def test_more_batches_than_there_are_blocks_are_answered_too(ends: Ends) -> None:
    runner, process = ends
    for number in range(NUM_BLOCKS + 2):
        runner.send(Encode(number, make_batch([number]), is_urgent=False))
    held = []
    for number in range(NUM_BLOCKS + 2):
        answer(process, process.receive())
        held += runner.receive()
        assert held[-1].number == number
    assert [encoded.results.covered.tolist() for encoded in held] == [[n, n] for n in range(NUM_BLOCKS + 2)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_batch_is_given_anothers_results_in_whatever_order_they_are_answered_and_dropped(
    data: st.DataObject,
) -> None:
    """As two streams answer them, urgent ones first, and results wait for the verdict of known texts."""
    runner, process = make_ends()
    with_process: list[tuple[Encode, int | None]] = []
    held: dict[int, Any] = {}
    sent: dict[int, list[int]] = {}
    with runner.connection, process.connection:
        for number in range(data.draw(st.integers(1, 40))):
            sent[number] = [number * 1000 + i for i in range(data.draw(st.integers(1, 30)))]
            runner.send(Encode(number, make_batch(sent[number]), is_urgent=False))
            with_process.append(process.receive())
            while with_process and data.draw(st.sampled_from([True, False])):
                answer(process, with_process.pop(data.draw(st.integers(0, len(with_process) - 1))))
                (encoded,) = runner.receive()
                held[encoded.number] = encoded.results
                del encoded
            for done, results in list(held.items()):
                assert results.covered.tolist() == np.repeat(sent[done], 2).tolist()
                if data.draw(st.booleans()):
                    del held[done]
                del results
    assert len({*runner._free_blocks}) == len(runner._free_blocks)


def write_and_die(connection: "Connection[Any, Any]", memory: int) -> None:
    """Answers one batch, writes the results of another, and ends before it says so."""
    channel = Channel(connection, memory, is_worker=False)
    answer(channel, channel.receive())
    message, block = channel.receive()
    assert block is not None
    channel._lay_out(Encoded(message.number, message.batch.inputs["input_ids"], 0.1), block)
    os._exit(1)


def test_results_that_a_process_wrote_and_did_not_say_are_lost_with_it_alone() -> None:
    ours, theirs = multiprocessing.Pipe()
    memory = make_memory()
    channel = Channel(ours, memory, is_worker=True)
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(theirs, memory))
    process.start()
    theirs.close()
    os.close(memory)
    with channel.connection:
        for number, row in ((1, [1, 2]), (2, [3])):
            channel.send(Encode(number, make_batch(row), is_urgent=False), number)
        process.join(80)
        assert process.exitcode == 1
        assert channel.receive()[0].results.covered.tolist() == [1, 1, 2, 2]
        with pytest.raises(EOFError):
            channel.receive()


@pytest.mark.parametrize("has_nameless_memory", [True, False])
def test_the_memory_has_no_name_and_no_pages_before_something_is_written(
    has_nameless_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_nameless_memory:
        monkeypatch.delattr(os, "memfd_create")
    memory = make_memory()
    try:
        found = os.fstat(memory)
        assert (found.st_nlink, found.st_blocks) == (0, 0)
        assert found.st_size == channel_module.MEMORY_BYTES
    finally:
        os.close(memory)
