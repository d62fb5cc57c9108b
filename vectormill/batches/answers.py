"""Answers: the lines of a batch's output file and error file, made from the results of its job's items.

The bytes depend on the stored results alone, so a file has the same content whenever it is made. An output
file is made while it is read. Results are read a few chunks at a time.
"""

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.batches.batches import find_batch
from vectormill.batches.endpoints import BASE64, split_key
from vectormill.batches.files import read_file
from vectormill.batches.request_batch import CANCELLED, EMBEDDINGS, EXPIRED, RERANK, RequestBatch, RequestFile
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import JobNotFound, RequestFileNotFound
from vectormill.jobs.export import read_blocks, read_stored
from vectormill.jobs.item import ItemFailure, Items, split_pair
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job
from vectormill.results.scores import rank_scores
from vectormill.vectors.decimals import SLOT_BYTES, write_decimals
from vectormill.vectors.vector_types import Rows

REFUSALS_PER_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """Consecutive items of a job with their results, from position `first_item` on.

    `rows` [n, width] are the results, `present` [n] says which items have one, `tokens` [n] are the items'
    token counts. `failures` are keyed by the item's index in the block; an item with neither a result nor a
    failure was never tried.
    """

    first_item: int
    items: Items
    rows: Rows
    present: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.int32]
    failures: dict[int, ItemFailure]

    @property
    def end(self) -> int:
        """Return the position after the last item of the block."""
        return self.first_item + len(self.items)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line of a batch's file that became no item, with the reason why it was refused."""

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


LIST_FAILURES = text("""
    SELECT item, code, detail FROM vectormill.item_errors
     WHERE job_id = :job_id AND item >= :start AND item < :stop ORDER BY item
""")


def read_answers(engine: Engine, job_id: UUID) -> Iterator[AnswerBlock]:
    """Yield all items of an ended job, in order. Raise JobNotFound, also if the job is deleted meanwhile."""
    with engine.connect() as connection:
        job = find_job(connection, job_id)
    yield from read_blocks(engine, job, partial(_make_block, job), 0)


def _make_block(
    job: Job,
    connection: Connection,
    first_item: int,
    items: Items,
    vectors: bytes | None,
    item_tokens: bytes | None,
) -> AnswerBlock:
    num_items = len(items)
    rows, present = read_stored(connection, job, None, items, vectors)
    # item_tokens is None if no item of the chunk was encoded.
    tokens = np.zeros(num_items, np.int32) if item_tokens is None else np.frombuffer(item_tokens, dtype="<i4")
    failures = {}
    if not present.all():
        values = {"job_id": job.id, "start": first_item, "stop": first_item + num_items}
        failures = {
            row.item - first_item: ItemFailure(row.code, row.detail)
            for row in connection.execute(LIST_FAILURES, values)
        }
    return AnswerBlock(first_item, items, rows, present, tokens, failures)


INSERT_REFUSAL = text("""
    INSERT INTO vectormill.request_refusals (batch_id, line, custom_id, code, message, param)
    VALUES (:batch_id, :line, :custom_id, :code, :message, :param)
""")


def add_refusals(connection: Connection, batch_id: UUID, refusals: Sequence[Refusal]) -> None:
    """Store refused lines. The transaction must have renewed the batch's lease already."""
    if refusals:
        values: list[dict[str, Any]] = [{"batch_id": batch_id, **asdict(refusal)} for refusal in refusals]
        connection.execute(INSERT_REFUSAL, values)


LIST_REFUSALS = text("""
    SELECT line, custom_id, code, message, param FROM vectormill.request_refusals
     WHERE batch_id = :batch_id AND line > :after ORDER BY line LIMIT :limit
""")


def read_refusals(engine: Engine, batch_id: UUID) -> Iterator[Refusal]:
    """Yield the refused lines of a batch, in the order of the file."""
    after = 0
    while True:
        values = {"batch_id": batch_id, "after": after, "limit": REFUSALS_PER_PAGE}
        with engine.connect() as connection:
            page = [Refusal(*row) for row in connection.execute(LIST_REFUSALS, values)]
        yield from page
        if len(page) < REFUSALS_PER_PAGE:
            return
        after = page[-1].line


# Rows are converted to decimals in strips of at most this many bytes.
STRIP_BYTES: Final = 256 << 10
BAD_REQUEST: Final = 400
SERVER_ERROR: Final = 500
# Codes of item errors for which the server is to blame, not the request.
OUR_FAULTS: Final = frozenset({"out_of_memory", "crashed_worker", "encoding_failed", "not_stored"})
NOT_TRIED: Final = {
    EXPIRED: ("batch_expired", "This request could not be answered before the completion window expired."),
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
}


@dataclass(slots=True)
class AnsweredLine:
    """A line of the file with the results of its items so far.

    `rows` has an entry for each item with a result.
    """

    line: int
    custom_id: str
    facts: dict[str, Any]
    num_items: int = 0
    num_tokens: int = 0
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)  # the rows as JSON
    texts: list[bytes] = field(default_factory=list)
    failure: ItemFailure | None = None

    @property
    def is_answered(self) -> bool:
        return len(self.rows) == self.num_items


class _Strips:
    """Writes a block's rows as JSON lists of numbers, several consecutive rows at a time."""

    def __init__(self, rows: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> None:
        self._rows = rows
        self._present = present
        self._length = max(1, STRIP_BYTES // (SLOT_BYTES * rows.shape[1]))
        self._start = -self._length
        self._written: npt.NDArray[np.uint8] | None = None

    def write(self, place: int) -> bytes:
        """Return a row as a JSON list; `place` is its index in the block."""
        if not self._start <= place < self._start + self._length:
            self._start = place
            strip = slice(place, place + self._length)
            finite = np.where(self._present[strip, np.newaxis], self._rows[strip], np.float32(0))
            self._written = write_decimals(finite)
        assert self._written is not None
        written: bytes = self._written[place - self._start].tobytes()
        return b"[" + written


def join_lines(blocks: Iterable[AnswerBlock], endpoint: str) -> Iterator[AnsweredLine]:
    """Yield each line of the file with the results of all its items.

    The items of a line may span several blocks.
    """
    current: AnsweredLine | None = None
    for block in blocks:
        strips = _Strips(block.rows, block.present)
        for place, key in enumerate(block.items.keys):
            line, index, custom_id = split_key(key)
            if index == 0:
                if current is not None:
                    yield current
                told = block.items.metadata[place]
                current = AnsweredLine(line, custom_id, msgspec.json.decode(told) if told else {})
            assert current is not None, "a line begins with its first item"
            _add_item(current, block, place, strips, endpoint)
    if current is not None:
        yield current


def _add_item(line: AnsweredLine, block: AnswerBlock, place: int, strips: _Strips, endpoint: str) -> None:
    line.num_items += 1
    if not block.present[place]:
        line.failure = line.failure or block.failures.get(place)
        return
    line.num_tokens += int(block.tokens[place])
    row = block.rows[place]
    line.rows.append(row)
    if endpoint == RERANK:
        if "return_documents" in line.facts:
            line.texts.append(block.items.texts[place])
    elif line.facts.get("encoding_format") == BASE64:
        line.written.append(b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"')
    else:
        line.written.append(strips.write(place))


class AnswerWriter:
    """A writer of a batch's output and error lines.

    `end_state`, in which the batch ended, decides the error of lines that were never tried.
    """

    def __init__(self, batch: RequestBatch, spec: EncodingSpec, end_state: str) -> None:
        self._id = batch.id
        self._spec = spec
        self._end_state = end_state
        self._model = msgspec.json.encode(spec.model)
        self._write_body: Callable[[AnsweredLine], bytes] = {
            EMBEDDINGS: self._write_embeddings,
            RERANK: self._write_ranking,
        }[batch.endpoint]

    def write_answer(self, line: AnsweredLine) -> bytes:
        """Return the output file's line for an answered request."""
        return (
            b'{"id":"%b","custom_id":%b,"response":{"status_code":200,"request_id":"%b","body":'
            % (
                _name_line("batch_req", self._id, line.line),
                msgspec.json.encode(line.custom_id),
                _name_line("req", self._id, line.line),
            )
            + self._write_body(line)
            + b'},"error":null}\n'
        )

    def write_failure(self, line: AnsweredLine) -> bytes:
        """Return the error file's line for a request that has no answer."""
        if line.failure is not None:
            status = SERVER_ERROR if line.failure.code in OUR_FAULTS else BAD_REQUEST
            return self._write_error(
                line.line, line.custom_id, status, line.failure.code, line.failure.detail
            )
        code, message = NOT_TRIED.get(self._end_state, NOT_TRIED[CANCELLED])
        told = {
            "id": _name_line("batch_req", self._id, line.line).decode(),
            "custom_id": line.custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
        return msgspec.json.encode(told) + b"\n"

    def write_refusal(self, refusal: Refusal) -> bytes:
        """Return the error file's line for a line that was refused."""
        message = f"Line {refusal.line}: {refusal.message}"
        return self._write_error(
            refusal.line, refusal.custom_id, BAD_REQUEST, refusal.code, message, refusal.param
        )

    def _write_error(
        self,
        line: int,
        custom_id: str | None,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
    ) -> bytes:
        kind = "invalid_request_error" if status == BAD_REQUEST else "server_error"
        told = {
            "id": _name_line("batch_req", self._id, line).decode(),
            "custom_id": custom_id,
            "response": {
                "status_code": status,
                "request_id": _name_line("req", self._id, line).decode(),
                "body": {"error": {"message": message, "type": kind, "param": param, "code": code}},
            },
            "error": None,
        }
        return msgspec.json.encode(told) + b"\n"

    def _write_embeddings(self, line: AnsweredLine) -> bytes:
        data = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, written)
            for index, written in enumerate(line.written)
        )
        return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
            data,
            self._model,
            line.num_tokens,
            line.num_tokens,
        )

    def _write_ranking(self, line: AnsweredLine) -> bytes:
        is_voyages = "is_voyages" in line.facts
        numbers = np.stack(line.rows).astype(np.float32)
        rows: list[dict[str, Any]] = []
        for index, score in rank_scores(numbers, self._spec.labels, line.facts.get("top_n")):
            document: str | dict[str, str] | None = None
            if line.texts:
                _, second = split_pair(line.texts[index])
                text = (second or b"").decode("utf-8", "replace")
                document = text if is_voyages else {"text": text}
            rows.append({"index": index, "relevance_score": score, "document": document})
        told = {"object": "list", "data": rows} if is_voyages else {"results": rows}
        usage = {"prompt_tokens": line.num_tokens, "total_tokens": line.num_tokens}
        return msgspec.json.encode({"model": self._spec.model, **told, "usage": usage})


def _name_line(kind: str, batch_id: UUID, line: int) -> bytes:
    return f"{kind}_{batch_id.hex}_{line}".encode()


PIECE_BYTES: Final = 256 << 10


def read_content(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """Yield the content of any file in pieces, whether it is stored or made from results.

    Raise RequestFileNotFound, also if the file is removed meanwhile.
    """
    return read_file(engine, file) if file.batch_id is None else read_output(engine, file)


def read_output(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """Yield the content of an output file in pieces: all answered lines, in the order of the input.

    Raise RequestFileNotFound, also if the job is removed meanwhile.
    """
    assert file.batch_id is not None
    try:
        with engine.connect() as connection:
            batch = find_batch(connection, file.batch_id)
            if batch.job_id is None:
                raise JobNotFound
            spec = find_job(connection, batch.job_id).spec
        writer = AnswerWriter(batch, spec, batch.state)
        parts: list[bytes] = []
        num_bytes = 0
        for line in join_lines(read_answers(engine, batch.job_id), batch.endpoint):
            if not line.is_answered:
                continue
            parts.append(writer.write_answer(line))
            num_bytes += len(parts[-1])
            if num_bytes >= PIECE_BYTES:
                yield b"".join(parts)
                parts, num_bytes = [], 0
        if parts:
            yield b"".join(parts)
    except JobNotFound as error:
        raise RequestFileNotFound(
            f"The content of {file.name} no longer exists: it is made from the results of a job that was removed."
        ) from error
