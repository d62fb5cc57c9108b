"""Result streams: how results that are no vectors are read and written, by their kind."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine

from api.streams.record_streams import RECORD_FORMATS
from api.streams.score_streams import SCORE_FORMATS
from api.streams.vector_streams import ResultFormat
from vectormill.domain.task import RECORD, SCORE
from vectormill.files.formats import RowsName
from vectormill.jobs.export import read_job_records, read_vectors


@dataclass(frozen=True, slots=True)
class ResultStream:
    """`read` gives a job's results in blocks, in constant memory; `formats` write them."""

    read: Callable[[Engine, UUID, str | None], Iterator[Any]]
    formats: Mapping[RowsName, ResultFormat]


RESULT_STREAMS: Final[Mapping[str, ResultStream]] = {
    SCORE: ResultStream(read_vectors, SCORE_FORMATS),
    RECORD: ResultStream(read_job_records, RECORD_FORMATS),
}
