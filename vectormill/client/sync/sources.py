# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Calls for sources of collections, runs and schedules."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack, cast

from vectormill.client.requests import NDJSON_HEADERS, Json, given, make_key_header
from vectormill.client.sync import flow
from vectormill.client.sync.transport import Transport
from vectormill.domain.encoding import OptionArguments
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.operations import QuoteBody
from vectormill.runs import operations as run_operations
from vectormill.runs.operations import RunArguments, RunBody
from vectormill.runs.run import HELD, TERMINAL_RUN_STATES
from vectormill.schedules import operations as schedule_operations
from vectormill.schedules.operations import ScheduleBody, ScheduledRunBody
from vectormill.sources import operations as source_operations
from vectormill.sources.operations import FollowingBody, FollowRequest, PushBody, SourceBody, SourceCheckBody


class SourceCalls(Transport):
    """Calls for sources, which are where the texts of collections come from."""

    def set_source(
        self,
        collection: str,
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        split: Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> SourceBody:
        """Set the collection's source. Its first rows are read before, unless `check` is False.

        For `kind`, `options` and `split` see docs/SOURCES.md.
        """
        body = {"kind": kind, "options": dict(options or {}), "split": dict(split or {})}
        return self.ask(source_operations.SET, collection, body=body, params={"check": check})

    def source(self, collection: str) -> SourceBody:
        return self.ask(source_operations.SHOW, collection)

    def check_source(self, collection: str) -> SourceCheckBody:
        """Read the first rows of the source now.

        Return their number, three of them, and errors in single rows.
        """
        return self.ask(source_operations.CHECK, collection)

    def delete_source(self, collection: str) -> None:
        """Remove the collection's source; its rows stay."""
        self.ask(source_operations.DELETE, collection)

    def push(
        self,
        collection: str,
        items: Iterable[ItemJson],
        *,
        complete: bool = False,
        gzip: bool = False,
        idempotency_key: str | None = None,
    ) -> PushBody:
        """Stream rows to a collection whose source is a push, and return `{"run", "num_items", …}`.

        `complete` says that these are all rows: other rows of the collection are deleted. If `items` can be
        iterated again, the upload is repeated after a lost connection, as in `submit`.
        """
        headers = NDJSON_HEADERS | make_key_header(idempotency_key)
        if gzip:
            headers["Content-Encoding"] = "gzip"
        return self.ask(
            source_operations.PUSH,
            collection,
            params={"complete": complete},
            headers=headers,
            make_body=lambda: flow.encode_body(items, gzip=gzip),
            is_repeatable=flow.can_repeat(items),
        )

    def follow(
        self, collection: str, *, table: str | None = None, key_column: str | None = None
    ) -> FollowingBody:
        """Put triggers on the source's table that record every change from now on.

        The table and key column default to those of the source's query.
        """
        return self.ask(source_operations.FOLLOW, collection, body=FollowRequest(table, key_column))

    def unfollow(self, collection: str) -> FollowingBody:
        """Remove the triggers from the source's table; rows of the collection stay."""
        return self.ask(source_operations.UNFOLLOW, collection)

    def following(self, collection: str) -> FollowingBody:
        """Return the table that the collection follows, and the number of pending changes."""
        return self.ask(source_operations.FOLLOWING, collection)


class RunCalls(Transport):
    """Calls for runs, which are long pieces of work on collections."""

    def reindex(self, collection: str, **options: Unpack[RunArguments]) -> RunBody:
        """Start a run that brings the collection up to date with its source. Only differences are encoded.

        If `options` mean another vector space, a new generation is built alongside the live one, and replaces it when
        it is complete and has passed its canary. For encoding options see docs/CONFIGURATION.md, for `confirm`, `full`
        and the limits docs/SOURCES.md.
        """
        return self.start_run(collection, "reindex", given(options))

    def quote_reindex(
        self, collection: str, *, model: str | None = None, **options: Unpack[OptionArguments]
    ) -> QuoteBody:
        """Return what `reindex` would take, from a sample of the source. Unchanged rows are not encoded again."""
        body = {"options": given({"model": model, **options}), "dry_run": True}
        quote: Any = self.ask(run_operations.START, collection, body=body, timeout=self.long_timeout)
        return cast(QuoteBody, quote)

    def start_run(
        self, collection: str, kind: str, options: Json | None = None, *, idempotency_key: str | None = None
    ) -> RunBody:
        """Start a run of the given kind (reindex, index or check) and return it."""
        body = {"kind": kind, "options": options or {}}
        return self.ask(run_operations.START, collection, body=body, headers=make_key_header(idempotency_key))

    def run(self, run_id: str) -> RunBody:
        """Return the run in its current state."""
        return self.ask(run_operations.SHOW, run_id)

    def runs(self, collection: str | None = None) -> Iterator[RunBody]:
        """Yield the runs of one collection, or of all, newest first, page by page."""
        if collection is None:
            return self.pages(RunBody, run_operations.LIST)
        return self.pages(RunBody, run_operations.LIST_OF, collection)

    def wait_run(
        self,
        run_id: str,
        on_poll: Callable[[RunBody], None] | None = None,
        *,
        poll_seconds: float = 0.5,
        timeout_seconds: float | None = None,
    ) -> RunBody:
        """Poll until the run ends or is held, and return it.

        `on_poll` is called with every answer, including the last.

        Raise WaitTimeout after `timeout_seconds`; the run itself continues.
        """
        ends, lookers = (*TERMINAL_RUN_STATES, HELD), [] if on_poll is None else [on_poll]
        return self._poll("Run", run_operations.SHOW, run_id, ends, lookers, poll_seconds, timeout_seconds)

    def cancel_run(self, run_id: str) -> RunBody:
        """Cancel the run and the job that encodes for it; results that it has written stay."""
        return self.ask(run_operations.CANCEL, run_id)

    def confirm_run(self, run_id: str) -> RunBody:
        """Confirm a held run, so that it continues."""
        return self.ask(run_operations.CONFIRM, run_id)


class ScheduleCalls(Transport):
    """Calls for schedules, which say when collections are re-indexed."""

    def create_schedule(
        self,
        collection: str,
        cron: str,
        *,
        timezone: str | None = None,
        overlap: str | None = None,
        name: str | None = None,
    ) -> ScheduleBody:
        """Create a schedule that re-indexes the collection at every due time.

        `cron` has five fields, in the time zone `timezone` (UTC by default); `overlap` is skip or queue. The
        schedule has the collection's name unless `name` is given.
        """
        body = {
            "collection": collection,
            "cron": cron,
            "timezone": timezone,
            "overlap": overlap,
            "name": name,
        }
        return self.ask(schedule_operations.CREATE, body=body)

    def schedules(self) -> Iterator[ScheduleBody]:
        """Yield every schedule, oldest first, page by page."""
        return self.pages(ScheduleBody, schedule_operations.LIST)

    def schedule(self, name: str) -> ScheduleBody:
        """Return the schedule with this name."""
        return self.ask(schedule_operations.SHOW, name)

    def change_schedule(
        self, name: str, *, cron: str | None = None, timezone: str | None = None, overlap: str | None = None
    ) -> ScheduleBody:
        """Change a schedule; arguments that are None keep their value."""
        body = {"cron": cron, "timezone": timezone, "overlap": overlap}
        return self.ask(schedule_operations.CHANGE, name, body=body)

    def pause_schedule(self, name: str) -> ScheduleBody:
        """Pause a schedule: due times are skipped until it is resumed."""
        return self.ask(schedule_operations.PAUSE, name)

    def resume_schedule(self, name: str) -> ScheduleBody:
        """Resume a paused schedule; due times missed in the meantime stay missed."""
        return self.ask(schedule_operations.RESUME, name)

    def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> ScheduledRunBody:
        """Start a run of the schedule now, and return its entry in the history."""
        return self.ask(schedule_operations.RUN, name, headers=make_key_header(idempotency_key))

    def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its runs stay."""
        self.ask(schedule_operations.DELETE, name)

    def schedule_runs(self, name: str) -> Iterator[ScheduledRunBody]:
        """Yield every run of a schedule, newest first, page by page; skipped ones have their reason."""
        return self.pages(ScheduledRunBody, schedule_operations.HISTORY, name)
