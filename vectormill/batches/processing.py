"""Processing of a request batch by an indexer: its file becomes a job, and the results of this a file of answers.

Each line of the file becomes items of the job, or is refused with a reason. The file is read twice: the first pass
finds repeated custom_ids. Each attempt starts from the beginning: the job is invisible until the transaction that
queues it, which also sets the batch in progress.
"""

from collections.abc import Iterator
from typing import Final
from uuid import UUID, uuid4

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Engine

from vectormill.batches.answers import (
    AnsweredLine,
    AnswerWriter,
    Refusal,
    add_refusals,
    join_lines,
    read_answers,
    read_refusals,
)
from vectormill.batches.batches import (
    BEGIN_PROGRESS,
    HeldBatch,
    add_output,
    begin_reading,
    end_batch,
    fail_batch,
)
from vectormill.batches.endpoints import (
    SHARED_OPTIONS,
    EncodingRequest,
    RefusedLine,
    RequestLine,
    check_ranks,
    find_custom_id,
    make_key,
    parse_line,
    resolve_spec,
)
from vectormill.batches.files import FileWriter, find_file, read_file
from vectormill.batches.request_batch import (
    BATCH_OUTPUT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    BatchFault,
    RequestBatch,
    RequestFile,
    name_file,
)
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, ModelError, RequestFileNotFound, UnknownModel
from vectormill.domain.task import REPRESENTATIONS
from vectormill.jobs.deletion import discard_upload, settle_upload
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.item import Items
from vectormill.jobs.job import CANCELLED as JOB_CANCELLED
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.rows.decoding import number_lines

REFUSALS_AT_ONCE: Final = 500
# A failed batch shows at most this many errors, enough to see what is wrong with its file.
MOST_FAULTS: Final = 50
LINES_BETWEEN_LOOKS: Final = 256


def validate(held: HeldBatch) -> None:
    """Validate a batch: queue its job, or fail the batch. Raise LeaseLost, Stopping and ModelError."""
    try:
        with held.engine.connect() as connection:
            file = find_file(connection, held.batch.input_file_id, may_be_expired=True)
        Validation(held, file).run()
    except RequestFileNotFound:
        name = name_file(held.batch.input_file_id)
        fault = BatchFault("input_file_not_found", f"The file {name} was removed before it was read.")
        with held.engine.begin() as connection:
            fail_batch(connection, held.lease, [fault])


class Validation:
    """One attempt to validate a batch. Not thread-safe."""

    def __init__(self, held: HeldBatch, file: RequestFile) -> None:
        self._held = held
        self._file = file
        self._batch = held.batch
        self._job_id = uuid4()
        self._encoding: EncodingRequest | None = None
        self._spec: EncodingSpec | None = None
        self._unusable: dict[EncodingRequest, RefusedLine] = {}
        self._refusals: list[Refusal] = []
        self._faults: list[BatchFault] = []
        self._num_lines = 0
        self._num_refused = 0
        self._num_items = 0

    def run(self) -> None:
        with self._held.engine.begin() as connection:
            begin_reading(connection, self._held.lease, self._job_id)
            if self._batch.job_id is not None:  # the upload of an interrupted attempt
                discard_upload(connection, self._batch.job_id)
        repeated = self._find_repeated()
        lines = self._parse_all(repeated)
        first = next(lines, None)
        if first is None:
            self._fail()
            return
        assert self._spec is not None
        new_job = NewJob(self._spec, metadata={"batch": self._batch.name}, id=self._job_id)
        with JobWriter(self._held.engine, new_job, self._held.settings) as writer:
            self._write(writer, first)
            for line in lines:
                self._write(writer, line)
            if self._num_items > self._held.settings.max_job_items:
                self._fail()
                return
            self._store_refusals()
            writer.finish(
                lambda connection, _: self._held.lease.release(
                    connection,
                    BEGIN_PROGRESS,
                    model=new_job.spec.model,
                    num_lines=self._num_lines,
                    num_refused=self._num_refused,
                )
            )

    def _read(self) -> Iterator[tuple[int, bytes | None]]:
        pieces = read_file(self._held.engine, self._file)
        for number, line in number_lines(pieces, self._held.settings.max_line_bytes):
            if number % LINES_BETWEEN_LOOKS == 1:  # line numbers start at 1
                self._held.keep()
            yield number, line

    def _find_repeated(self) -> npt.NDArray[np.int64]:
        """Return the indexes, among non-blank lines, of the lines whose custom_id an earlier line has."""
        ledger = DuplicateFinder()
        try:
            for number, line in self._read():
                custom_id = None if line is None else find_custom_id(line)
                # A line without a custom_id gets a unique key, which no accepted custom_id equals, as these
                # have no NUL.
                own = f"\0{number}" if custom_id is None else custom_id
                ledger.add(own.encode("utf-8", "surrogatepass"))
            return ledger.find_repeated()
        finally:
            ledger.close()

    def _parse_all(self, repeated: npt.NDArray[np.int64]) -> Iterator[tuple[int, RequestLine]]:
        """Yield the lines that can be answered, with their numbers; record a refusal for every other line."""
        upcoming = iter(repeated.tolist())
        next_repeated = next(upcoming, None)
        for place, (number, content) in enumerate(self._read()):
            self._num_lines += 1
            is_repeated = place == next_repeated
            if is_repeated:
                next_repeated = next(upcoming, None)
            try:
                line = self._parse(content)
                if is_repeated:
                    raise RefusedLine(
                        "duplicate_custom_id",
                        f"an earlier line already has the custom_id {line.custom_id!r}; only the first is answered.",
                        custom_id=line.custom_id,
                        param="custom_id",
                    )
                self._check_encoding(line)
            except RefusedLine as refused:
                self._refuse(number, refused)
            else:
                yield number, line

    def _parse(self, content: bytes | None) -> RequestLine:
        settings = self._held.settings
        if content is None:
            raise RefusedLine(
                "line_too_long",
                f"the line has more than {settings.max_line_bytes} bytes (VECTORMILL_MAX_LINE_BYTES).",
            )
        return parse_line(content, self._batch.endpoint, settings.max_key_bytes)

    def _check_encoding(self, line: RequestLine) -> None:
        """Adopt the first valid line's model and options for the batch.

        Raise RefusedLine for a later line with another model or other options.
        """
        encoding, known = line.encoding, self._encoding
        if encoding == known:
            return
        if known is None:
            self._spec = self._make_spec(line)
            self._encoding = encoding
            return
        if encoding.model != known.model:
            reason = (
                f"the model is {encoding.model[:100]!r}, but the batch uses {known.model!r}; "
                "all lines of a batch must have the same model."
            )
            raise RefusedLine("mismatched_model", reason, custom_id=line.custom_id, param="model")
        for name in SHARED_OPTIONS:
            theirs, ours = encoding.find(name), known.find(name)
            if theirs != ours:
                reason = f"{name} is {theirs!r}, but {ours!r} in the first line; all lines must have the same value."
                raise RefusedLine("mismatched_options", reason, custom_id=line.custom_id, param=name)

    def _make_spec(self, line: RequestLine) -> EncodingSpec:
        """Return the encoding spec of a line.

        Raise RefusedLine, and ModelError if the model's files are unavailable for now.
        """
        if line.encoding in self._unusable:
            earlier = self._unusable[line.encoding]
            raise RefusedLine(earlier.code, earlier.message, custom_id=line.custom_id, param=earlier.param)
        try:
            spec = resolve_spec(self._held.registry, line.encoding)
            if spec.result == REPRESENTATIONS:
                raise InvalidOption(
                    f"A batch returns dense vectors, not {spec.outputs}; submit a job with these outputs instead."
                )
            check_ranks(spec)
        except ModelError:
            raise
        except UnknownModel as error:
            refused = RefusedLine("model_not_found", str(error), custom_id=line.custom_id, param="model")
        except InvalidOption as error:
            refused = RefusedLine("invalid_request", str(error), custom_id=line.custom_id)
        else:
            return spec
        if len(self._unusable) < MOST_FAULTS:
            self._unusable[line.encoding] = refused
        raise refused

    def _write(self, writer: JobWriter, numbered: tuple[int, RequestLine]) -> None:
        number, line = numbered
        self._num_items += len(line.texts)
        if self._num_items > self._held.settings.max_job_items:
            fault = BatchFault(
                "too_many_requests",
                f"The file has more than {self._held.settings.max_job_items:,} texts (VECTORMILL_MAX_JOB_ITEMS); "
                "split it into several files.",
                line=number,
            )
            self._faults = [fault]
            return
        keys = [make_key(number, index, line.custom_id) for index in range(len(line.texts))]
        metadata = [b""] * len(keys)
        if line.facts:
            metadata[0] = msgspec.json.encode(line.facts)
        writer.add_all(Items(keys, line.texts, metadata))

    def _refuse(self, number: int, refused: RefusedLine) -> None:
        self._num_refused += 1
        # The line may contain NUL, which Postgres cannot store.
        message, custom_id, param = (
            None if told is None else told.replace("\0", "")
            for told in (refused.message, refused.custom_id, refused.param)
        )
        message = message or ""
        if len(self._faults) < MOST_FAULTS:
            self._faults.append(BatchFault(refused.code, message, number, param))
        self._refusals.append(Refusal(number, custom_id, refused.code, message, param))
        if len(self._refusals) >= REFUSALS_AT_ONCE:
            self._store_refusals()

    def _store_refusals(self) -> None:
        if self._refusals:
            with self._held.engine.begin() as connection:
                self._held.lease.keep(connection)
                add_refusals(connection, self._batch.id, self._refusals)
            self._refusals = []

    def _fail(self) -> None:
        faults = self._faults or [BatchFault("empty_file", "The file has no requests; write one per line.")]
        with self._held.engine.begin() as connection:
            fail_batch(connection, self._held.lease, faults, self._num_lines)


DAY_SECONDS: Final = 86400.0


def finalize(held: HeldBatch) -> None:
    """Make the files of a batch whose job has ended, and end the batch. Raise LeaseLost and Stopping."""
    batch = held.batch
    job = None
    if batch.job_id is not None:
        with held.engine.begin() as connection:
            job = settle_upload(connection, batch.job_id)
    if job is not None:
        write_answers(held, job)
    elif batch.state == CANCELLING:  # cancelled before its job was queued
        with held.engine.begin() as connection:
            end_batch(connection, held.lease, CANCELLED)
    else:
        fault = BatchFault(
            "job_removed", f"The job {batch.job_id} was removed before its answers were written."
        )
        with held.engine.begin() as connection:
            fail_batch(connection, held.lease, [fault], batch.num_lines)


def choose_end(batch: RequestBatch, job: Job) -> str:
    """Return the final state of a batch whose job has ended."""
    if batch.cancelling_at is not None:
        return CANCELLED
    if job.state != JOB_CANCELLED:
        return COMPLETED
    return EXPIRED if batch.is_overdue else CANCELLED


def write_answers(held: HeldBatch, job: Job) -> None:
    """Count the lines, write the error file, and end the batch in the last transaction."""
    batch, end_state = held.batch, choose_end(held.batch, job)
    lines = AnswerWriter(batch, job.spec, end_state)
    num_completed = num_failed = output_bytes = 0
    with FileWriter(held.engine) as errors:
        for number, line in enumerate(merge_lines(held.engine, batch, job.id)):
            if number % LINES_BETWEEN_LOOKS == 0:
                held.keep()
            if isinstance(line, Refusal):
                errors.add(lines.write_refusal(line))
                num_failed += 1
            elif line.is_answered:
                output_bytes += len(lines.write_answer(line))
                num_completed += 1
            else:
                errors.add(lines.write_failure(line))
                num_failed += 1
        lifetime = batch.output_lifetime_seconds or held.settings.file_retention_days * DAY_SECONDS
        output_file_id = uuid4() if num_completed else None
        error_file_id = errors.id if num_failed else None
        with held.engine.begin() as connection:
            held.lease.keep(connection)
            if output_file_id is not None:
                add_output(connection, batch, output_file_id, output_bytes, lifetime)
            if error_file_id is not None:
                errors.finish_in(connection, BATCH_OUTPUT, f"{batch.name}_error.jsonl", lifetime)
            end_batch(
                connection,
                held.lease,
                end_state,
                num_completed=num_completed,
                num_failed=num_failed,
                num_tokens=job.num_tokens,
                output_file_id=output_file_id,
                error_file_id=error_file_id,
            )


def merge_lines(engine: Engine, batch: RequestBatch, job_id: UUID) -> Iterator[AnsweredLine | Refusal]:
    """Yield the answered and the refused lines of a batch, in the order of the file."""
    refusals = read_refusals(engine, batch.id)
    refusal = next(refusals, None)
    for line in join_lines(read_answers(engine, job_id), batch.endpoint):
        while refusal is not None and refusal.line < line.line:
            yield refusal
            refusal = next(refusals, None)
        yield line
    if refusal is not None:
        yield refusal
        yield from refusals
