"""Schedules over HTTP."""

from collections.abc import AsyncIterator

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import fill_path, given, make_key_header
from vectormill.schedules import operations
from vectormill.schedules.bodies import ScheduleBody, ScheduleChange, ScheduledRunBody, ScheduleRequest


class ScheduleCalls(Transport):
    """When collections are re-indexed."""

    async def create_schedule(
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
        return await self.ask(operations.CREATE, body=ScheduleRequest(collection, cron, **told))

    def schedules(self) -> AsyncIterator[ScheduleBody]:
        """Yield every schedule, the oldest first, page by page."""
        return self.pages(ScheduleBody, operations.LIST.path, {})

    async def schedule(self, name: str) -> ScheduleBody:
        """Return one schedule."""
        return await self.ask(operations.SHOW, name)

    async def change_schedule(
        self, name: str, *, cron: str | None = None, timezone: str | None = None, overlap: str | None = None
    ) -> ScheduleBody:
        """Change what is not None."""
        told = given({"cron": cron, "timezone": timezone, "overlap": overlap})
        return await self.ask(operations.CHANGE, name, body=ScheduleChange(**told))

    async def pause_schedule(self, name: str) -> ScheduleBody:
        """Let due times pass until it is resumed."""
        return await self.ask(operations.PAUSE, name)

    async def resume_schedule(self, name: str) -> ScheduleBody:
        """End a pause; what fell due in it stays missed."""
        return await self.ask(operations.RESUME, name)

    async def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> ScheduledRunBody:
        """Make a run now and return it as the history has it."""
        return await self.ask(operations.RUN, name, headers=make_key_header(idempotency_key))

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its runs stay."""
        await self.ask(operations.DELETE, name)

    def schedule_runs(self, name: str) -> AsyncIterator[ScheduledRunBody]:
        """Yield every run that it made, the newest first, skipped ones with their reason, page by page."""
        return self.pages(ScheduledRunBody, fill_path(operations.HISTORY.path, name), {})
