"""CommitWaits: why commits wait at the moment. The sink writes it down, and the worker's report tells it."""


class CommitWaits:
    """Thread-safe: each chunk is one thread's, and a dict's own steps are whole."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def note(self, chunk_id: int, reason: str) -> None:
        self._reasons[chunk_id] = reason

    def forget(self, chunk_id: int) -> None:
        self._reasons.pop(chunk_id, None)

    @property
    def reason(self) -> str | None:
        """What one of them waits for; None when none does."""
        return next(iter(self._reasons.copy().values()), None)
