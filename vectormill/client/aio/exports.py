"""Exports over HTTP: a body that is written into a file or read row by row, and goes on after a lost connection.

NDJSON goes on behind the last line that came whole. Other formats cannot: without its end such a file is none, so that
it begins anew, and only in a path. A path gets the whole export or is left as it was.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import given
from vectormill.files.replacement import open_replacement
from vectormill.problems import ApiError, ApiUnreachable

NDJSON = "ndjson"
# Headers of the answer that are asked for again when the export goes on, by the name of the parameter.
GENERATION_HEADER = "Vectormill-Generation"


@dataclass(slots=True)
class Export:
    """One body: where it is, how it is asked for, and what is said when it breaks off for good."""

    path: str
    parameters: Mapping[str, Any]
    format: str
    broken: str | None = None
    answered: dict[str, str] = field(default_factory=dict)


class ExportTransport(Transport):
    """The parts that exports of jobs and of collections share."""

    async def write_export(self, export: Export, target: str | Path | BinaryIO) -> int:
        """Return the number of bytes. A file object gets what came until an error."""
        if isinstance(target, str | Path):
            return await self._write_whole(export, Path(target))
        return await self._write_parts(export, target)

    async def export_parts(self, export: Export) -> AsyncIterator[bytes]:
        """Yield the body, in parts of whole lines where it has lines."""
        after = export.parameters.get("after")
        try:
            if export.format == NDJSON:
                async for part in self.resumed_parts(lambda key: self._open(export, key), after):
                    yield part
            else:
                async for part in self._open(export, after):
                    yield part
        except (ApiError, ApiUnreachable) as error:
            if not export.answered or export.broken is None:
                raise
            raise ApiUnreachable(export.broken) from error

    async def _write_parts(self, export: Export, file: BinaryIO) -> int:
        num_bytes = 0
        async for part in self.export_parts(export):
            file.write(part)
            num_bytes += len(part)
        return num_bytes

    async def _write_whole(self, export: Export, path: Path) -> int:
        pauses = self.retries.begin()
        while True:
            try:
                with open_replacement(path) as file:
                    return await self._write_parts(export, file)
            except ApiUnreachable as error:
                is_hopeless = export.format == NDJSON or isinstance(error.__cause__, ApiError)
                pause = None if is_hopeless or not export.answered else pauses.before_next(error)
                if pause is None:
                    raise
            await self.pause_for(pause)

    async def _open(self, export: Export, after: str | None) -> AsyncIterator[bytes]:
        parameters = {**export.parameters, "format": export.format, "after": after}
        if GENERATION_HEADER in export.answered:
            parameters["generation"] = export.answered[GENERATION_HEADER]
        async with self.answered(
            "GET", export.path, params=given(parameters), timeout=self.long_timeout
        ) as response:
            export.answered["status"] = str(response.status_code)
            if GENERATION_HEADER in response.headers:
                export.answered[GENERATION_HEADER] = response.headers[GENERATION_HEADER]
            async for part in response.aiter_bytes():
                yield part
