"""Answer lines: the lines of an output file and of an error file, from what came of a batch's items.

The bytes are decided by the stored results alone, so that a file is the same whenever it is made. Knows no database.
"""

import base64
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from vectormill.batches.answers import AnswerBlock, Refusal
from vectormill.batches.request_batch import CANCELLED, EMBEDDINGS, EXPIRED, RERANK, RequestBatch
from vectormill.batches.request_lines import BASE64, split_key
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.pair import split_pair
from vectormill.vectors.decimals import SLOT_BYTES, write_decimals
from vectormill.vectors.scores import rank_scores

# So many bytes of decimals are made at a time.
STRIP_BYTES: Final = 256 << 10
BAD_REQUEST: Final = 400
SERVER_ERROR: Final = 500
# Failures of ours, not of what was sent.
OUR_FAULTS: Final = frozenset({"out_of_memory", "crashed_worker", "encoding_failed", "not_stored"})
NOT_TRIED: Final = {
    EXPIRED: ("batch_expired", "This request could not be answered before the completion window expired."),
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
}


@dataclass(slots=True)
class AnsweredLine:
    """A line and what came of its items so far. Of `rows` there is one for each item that has a result."""

    line: int
    custom_id: str
    facts: dict[str, Any]
    num_items: int = 0
    num_tokens: int = 0
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)  # the rows as JSON
    texts: list[bytes] = field(default_factory=list)
    failure: ItemFailure | None = None
    is_tried: bool = True

    @property
    def is_answered(self) -> bool:
        return len(self.rows) == self.num_items


class _Strips:
    """Decimals of a block's rows, made for some rows at a time, when one of them is asked for."""

    def __init__(self, rows: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> None:
        self._rows = rows
        self._present = present
        self._length = max(1, STRIP_BYTES // (SLOT_BYTES * rows.shape[1]))
        self._start = -self._length
        self._written: npt.NDArray[np.uint8] | None = None

    def write(self, place: int) -> bytes:
        """The row as a JSON list."""
        if not self._start <= place < self._start + self._length:
            self._start = place
            strip = slice(place, place + self._length)
            finite = np.where(self._present[strip, np.newaxis], self._rows[strip], np.float32(0))
            self._written = write_decimals(finite)
        assert self._written is not None
        written: bytes = self._written[place - self._start].tobytes()
        return b"[" + written


def join_lines(blocks: Iterable[AnswerBlock], endpoint: str) -> Iterator[AnsweredLine]:
    """The items of all blocks by their lines, which may go on in the next block."""
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
        failure = block.failures.get(place)
        line.failure = line.failure or failure
        line.is_tried &= failure is not None
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
    """Writes lines of one batch. Which state it ended in decides what is told of lines that were never tried."""

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
        """A line of the output file."""
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
        """A line of the error file, for what has no answer."""
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
        """A line of the error file, for what became no item."""
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
