"""Events: Server-Sent Events of a job, line by line (HTML Living Standard, section 9.2). Reads from no connection."""

import msgspec

from vectormill.client.shapes import JobBody


class EventReader:
    """Reads server-sent events from one stream, whose lines end with \\n as our API writes them."""

    def __init__(self) -> None:
        self._data: list[bytes] = []

    def read(self, line: bytes) -> JobBody | None:
        """Return the job, when the line ends an event that tells of one. Comments keep the connection awake."""
        line = line.removesuffix(b"\r")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        job: JobBody = msgspec.json.decode(data)
        return job
