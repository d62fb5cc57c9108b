"""Push: what a client streamed to a run, in its order. Parts are written by vectormill/db/runs/pushes.py."""

from collections.abc import Iterator

from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.runs.pushes import count_items, load_part
from vectormill.domain.errors import SourceFailed
from vectormill.domain.jobs.item import Item
from vectormill.sources.reader import Complaints, SourcePlace


class PushReader:
    """Reads the parts of the place's run. The API looked at keys and metadata when they came."""

    def __init__(self, place: SourcePlace) -> None:
        self._place = place
        self.complaints = Complaints()

    def read(self) -> Iterator[list[Item]]:
        if self._place.run_id is None:
            return
        seq = -1
        try:
            while True:
                with self._place.engine.connect() as connection:
                    part = load_part(connection, self._place.run_id, after=seq)
                if part is None:
                    break
                seq = part.seq
                yield part.items
        except SQLAlchemyError as error:
            words = " ".join(str(getattr(error, "orig", error)).split())
            raise SourceFailed(f"What was pushed cannot be read: {words.rstrip('.')}.") from error
        if seq < 0:
            raise SourceFailed(
                "Nothing was pushed to this run. A collection whose source is a push follows what a client sends: "
                "`vectormill push COLLECTION FILE`."
            )

    def count_rows(self) -> int | None:
        if self._place.run_id is None:
            return None
        with self._place.engine.connect() as connection:
            return count_items(connection, self._place.run_id)
