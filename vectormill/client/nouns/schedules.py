"""Schedules over HTTP."""

from collections.abc import Iterator

from vectormill.client.transport import Json, Transport, given, make_path


class ScheduleCalls(Transport):
    """Of when collections are re-indexed."""

    def create_schedule(
        self,
        collection: str,
        cron: str,
        *,
        timezone: str | None = None,
        overlap: str | None = None,
        name: str | None = None,
    ) -> Json:
        """A re-index of the collection at every due time from now on; called as the collection unless named.

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
        return self.call("POST", "/v1/schedules", json=given(body), is_repeatable=False)

    def schedules(self) -> Iterator[Json]:
        """Every schedule, the oldest first, page by page."""
        return self.pages("/v1/schedules", {})

    def schedule(self, name: str) -> Json:
        return self.call("GET", make_path("/v1/schedules", name))

    def change_schedule(
        self, name: str, *, cron: str | None = None, timezone: str | None = None, overlap: str | None = None
    ) -> Json:
        """What is None stays as it is."""
        body = {"cron": cron, "timezone": timezone, "overlap": overlap}
        return self.call("PATCH", make_path("/v1/schedules", name), json=given(body))

    def pause_schedule(self, name: str) -> Json:
        """Lets due times pass until it is resumed."""
        return self.call("POST", make_path("/v1/schedules", name, "pause"))

    def resume_schedule(self, name: str) -> Json:
        """Ends a pause; what fell due in it stays missed."""
        return self.call("POST", make_path("/v1/schedules", name, "resume"))

    def run_schedule(self, name: str) -> Json:
        """Its run, now; answers it as the history has it."""
        return self.call("POST", make_path("/v1/schedules", name, "run"), is_repeatable=False)

    def delete_schedule(self, name: str) -> None:
        """Its runs stay."""
        self.call("DELETE", make_path("/v1/schedules", name))

    def schedule_runs(self, name: str) -> Iterator[Json]:
        """Every run that it made, the newest first, skipped ones with their reason, page by page."""
        return self.pages(make_path("/v1/schedules", name, "runs"), {})
