"""Push: what a client streamed to a run, in its order. Parts are written by vectormill/sources/pushes.py."""

from collections.abc import Iterator

from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.sources.interruptions import describe_database_error
from vectormill.sources.pushes import count_items, find_num_parts, load_part
from vectormill.sources.reader import Complaints, SourcePlace


class PushReader:
    """Reads the parts of the place's run. The API looked at keys and metadata when they came."""

    def __init__(self, place: SourcePlace) -> None:
        self._place = place
        self.complaints = Complaints()

    def read(self) -> Iterator[list[Item]]:
        if self._place.run_id is None:
            return
        seq, num_parts = -1, 0
        try:
            while True:
                with self._place.engine.connect() as connection:
                    part = load_part(connection, self._place.run_id, after=seq)
                    num_written = find_num_parts(connection, self._place.run_id) if part is None else None
                if part is None:
                    break
                seq = part.seq
                num_parts += 1
                yield part.items
        except DATABASE_ERRORS as error:
            raise describe_database_error("What was pushed", error) from error
        if seq < 0:
            raise SourceFailed(
                "Nothing was pushed to this run. A collection whose source is a push follows what a client sends: "
                "`vectormill push COLLECTION FILE`."
            )

        if num_written is not None and num_parts != num_written:
            raise SourceFailed(
                f"Only {num_parts} of {num_written} parts of the push arrived, so rows are missing; push again."
            )

    def count_rows(self) -> int | None:
        if self._place.run_id is None:
            return None
        with self._place.engine.connect() as connection:
            return count_items(connection, self._place.run_id)
