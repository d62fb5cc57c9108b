# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Schedules over HTTP."""

from collections.abc import Iterator

from vectormill.client.requests import fill_path, given, make_key_header
from vectormill.client.sync.transport import Transport
from vectormill.schedules import operations
from vectormill.schedules.bodies import ScheduleBody, ScheduleChange, ScheduledRunBody, ScheduleRequest


class ScheduleCalls(Transport):
    """When collections are re-indexed."""

    def create_schedule(
        self,
        collection: str,
        cron: str,
        *,
        timezone: str | None = None,
        overlap: str | None = None,
        name: str | None = None,
    ) -> ScheduleBody:
        """Re-index the collection at every due time from now on; called as the collection unless named.

        `cron` has five fields, on the clock of `timezone` (UTC); `overlap` is skip or queue.
        """
        told = given({"timezone": timezone, "overlap": overlap, "name": name})
        return self.ask(operations.CREATE, body=ScheduleRequest(collection, cron, **told))

    def schedules(self) -> Iterator[ScheduleBody]:
        """Yield every schedule, the oldest first, page by page."""
        return self.pages(ScheduleBody, operations.LIST.path, {})

    def schedule(self, name: str) -> ScheduleBody:
        """Return one schedule."""
        return self.ask(operations.SHOW, name)

    def change_schedule(
        self, name: str, *, cron: str | None = None, timezone: str | None = None, overlap: str | None = None
    ) -> ScheduleBody:
        """Change what is not None."""
        told = given({"cron": cron, "timezone": timezone, "overlap": overlap})
        return self.ask(operations.CHANGE, name, body=ScheduleChange(**told))

    def pause_schedule(self, name: str) -> ScheduleBody:
        """Let due times pass until it is resumed."""
        return self.ask(operations.PAUSE, name)

    def resume_schedule(self, name: str) -> ScheduleBody:
        """End a pause; what fell due in it stays missed."""
        return self.ask(operations.RESUME, name)

    def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> ScheduledRunBody:
        """Make a run now and return it as the history has it."""
        return self.ask(operations.RUN, name, headers=make_key_header(idempotency_key))

    def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its runs stay."""
        self.ask(operations.DELETE, name)

    def schedule_runs(self, name: str) -> Iterator[ScheduledRunBody]:
        """Yield every run that it made, the newest first, skipped ones with their reason, page by page."""
        return self.pages(ScheduledRunBody, fill_path(operations.HISTORY.path, name), {})
