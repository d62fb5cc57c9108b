"""Outputs: the content of a batch's output file, made of its job's results while it is read, the same every time."""

from collections.abc import Generator
from typing import Final

from sqlalchemy import Engine

from vectormill.batches.answer_lines import AnswerWriter, join_lines
from vectormill.batches.answers import read_answers
from vectormill.batches.batches import find_batch
from vectormill.batches.files import read_file
from vectormill.batches.request_file import RequestFile
from vectormill.domain.errors import JobNotFound, RequestFileNotFound
from vectormill.jobs.jobs import find_job

PIECE_BYTES: Final = 256 << 10


def read_content(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """Whatever a file is made of, in pieces. Raises RequestFileNotFound, also in the middle when it is removed."""
    return read_file(engine, file) if file.batch_id is None else read_output(engine, file)


def read_output(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """The lines that have an answer, in the order of the input file."""
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
            f"The content of {file.name} is made of the results of its batch's job, which was removed."
        ) from error
