"""Schedules over HTTP."""

from collections.abc import AsyncIterator

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import Json, given, make_key_header, make_path
from vectormill.client.shapes import ScheduleBody, ScheduledRunBody


class ScheduleCalls(Transport):
    """Calls for schedules: when collections are re-indexed."""

    async def create_schedule(
        self,
        collection: str,
        cron: str,
        *,
        timezone: str | None = None,
        overlap: str | None = None,
        name: str | None = None,
    ) -> ScheduleBody:
        """Return a re-index of the collection at every due time from now on; called as the collection unless named.

        `cron` has five fields, on the clock of `timezone` (UTC); `overlap` is skip or queue.
        """
        body = {
            "collection": collection,
            "cron": cron,
            "timezone": timezone,
            "overlap": overlap,
            "name": name,
        }
        # Not repeated: the second attempt would meet the schedule of the first.
        return await self.call(ScheduleBody, "POST", "/v1/schedules", json=given(body), is_repeatable=False)

    def schedules(self) -> AsyncIterator[ScheduleBody]:
        """Yield every schedule, the oldest first, page by page."""
        return self.pages(ScheduleBody, "/v1/schedules", {})

    async def schedule(self, name: str) -> ScheduleBody:
        return await self.call(ScheduleBody, "GET", make_path("/v1/schedules", name))

    async def change_schedule(
        self, name: str, *, cron: str | None = None, timezone: str | None = None, overlap: str | None = None
    ) -> ScheduleBody:
        """Change a schedule; whatever is None stays as it is."""
        body = {"cron": cron, "timezone": timezone, "overlap": overlap}
        return await self.call(ScheduleBody, "PATCH", make_path("/v1/schedules", name), json=given(body))

    async def pause_schedule(self, name: str) -> ScheduleBody:
        """Let due times pass until it is resumed."""
        return await self.call(ScheduleBody, "POST", make_path("/v1/schedules", name, "pause"))

    async def resume_schedule(self, name: str) -> ScheduleBody:
        """End a pause; what fell due in it stays missed."""
        return await self.call(ScheduleBody, "POST", make_path("/v1/schedules", name, "resume"))

    async def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> ScheduledRunBody:
        """Start the schedule's run now; return it as the history has it."""
        path = make_path("/v1/schedules", name, "run")
        return await self.call(ScheduledRunBody, "POST", path, headers=make_key_header(idempotency_key))

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its runs stay."""
        await self.call(Json, "DELETE", make_path("/v1/schedules", name))

    def schedule_runs(self, name: str) -> AsyncIterator[ScheduledRunBody]:
        """Yield every run that it made, the newest first, skipped ones with their reason, page by page."""
        return self.pages(ScheduledRunBody, make_path("/v1/schedules", name, "runs"), {})
