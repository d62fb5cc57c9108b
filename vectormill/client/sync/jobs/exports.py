# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""The results of jobs over HTTP: vectors, scores and records, row by row, as files or as tables."""

from pathlib import Path
from typing import Any, BinaryIO, Final

from vectormill.client.requests import given, make_path
from vectormill.client.shapes import JobBody
from vectormill.client.shapes.rows import RecordRow, ScoreRow, VectorRow
from vectormill.client.sync.exports import Export, ExportTransport
from vectormill.client.sync.results import Results
from vectormill.domain.tasks.task import EMBED, RECORD, RESULT_ROUTES, SCORE, TASKS, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS

EXPORT_FORMATS: Final = tuple(OUTPUT_FORMATS)


class JobExportCalls(ExportTransport):
    """Calls for the results of jobs. `partial` includes those of a job that has not ended."""

    def export(
        self, job_id: str, target: str | Path | BinaryIO, format: str = "ndjson", *, partial: bool = False
    ) -> int:
        """Streams the job's vectors into a file, or its other results, and returns the number of bytes.

        A path gets the whole export or is left as it was; a file object gets what came until an error. A lost
        connection is made again: NDJSON goes on behind the last line, another format begins anew, in a path alone.
        """
        described = self._describe_export(job_id, None, format, partial)
        return self.write_export(described, target)

    def vectors(self, job_id: str, *, partial: bool = False) -> Results[VectorRow]:
        """Return every vector as `{"key", "embedding"}`, in constant memory, or all as a table: `.to_numpy()` and
        others.
        """
        return self._results(job_id, RESULT_ROUTES[VECTOR], partial)

    def scores(self, job_id: str, *, partial: bool = False) -> Results[ScoreRow]:
        """Return every score as `{"key", "score", "label", "probabilities"}`."""
        return self._results(job_id, RESULT_ROUTES[SCORE], partial)

    def records(self, job_id: str, *, partial: bool = False) -> Results[RecordRow]:
        """Return every record as `{"key", "output"}`."""
        return self._results(job_id, RESULT_ROUTES[RECORD], partial)

    def results(self, job_id: str, *, partial: bool = False) -> Results[dict[str, Any]]:
        """Return every result of a job of whatever task, as a row of its kind."""
        return self._results(job_id, None, partial)

    def _results(self, job_id: str, route: str | None, partial: bool) -> Results[Any]:
        def describe(format: str) -> Export:
            return self._describe_export(job_id, route, format, partial)

        return Results(self, describe)

    def _describe_export(self, job_id: str, route: str | None, format: str, partial: bool) -> Export:
        found = route or self._find_route(job_id)
        return Export(
            make_path("/v1/jobs", job_id, found),
            given({"partial": True if partial else None}),
            format,
            broken=f"The export of job {job_id} broke off, and what came is not whole: the API ended, the connection "
            "was lost, or the job was removed meanwhile. `vectormill status JOB` tells whether it is there still.",
        )

    def _find_route(self, job_id: str) -> str:
        """Return the route of the job's results; an API of a release without tasks has vectors only."""
        job = self.call(JobBody, "GET", make_path("/v1/jobs", job_id))
        return RESULT_ROUTES[TASKS[job["options"].get("task", EMBED)].result]
