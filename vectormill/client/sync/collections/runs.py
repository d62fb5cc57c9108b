# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Runs over HTTP: start, look, wait, cancel, confirm."""

import time
from collections.abc import Callable, Iterator
from typing import Unpack

from vectormill.client.requests import Json, fill_path, given, make_key_header
from vectormill.client.sync.transport import Transport
from vectormill.domain.encoding import OptionArguments
from vectormill.problems import WaitTimeout
from vectormill.runs import operations
from vectormill.runs.bodies import RunBody
from vectormill.runs.run import HELD, TERMINAL_RUN_STATES


class RunCalls(Transport):
    """Calls for runs: long work on collections."""

    def reindex(
        self,
        collection: str,
        *,
        model: str | None = None,
        priority: int | None = None,
        confirm: bool = False,
        max_change_share: float | None = None,
        most_failed_share: float | None = None,
        least_recall: float | None = None,
        least_cosine: float | None = None,
        canary_sample: int | None = None,
        **options: Unpack[OptionArguments],
    ) -> RunBody:
        """Start a run that makes the collection what its source is; only what differs is encoded.

        Where `model` and `options` mean another vector space, a new generation is built beside the live one, and takes
        its place when it is whole and has passed its canary. What they are and do: docs/CONFIGURATION.md; the limits:
        docs/OPERATIONS.md.
        """
        wishes = {
            "model": model,
            "priority": priority,
            "confirm": confirm or None,
            "max_change_share": max_change_share,
            "most_failed_share": most_failed_share,
            "least_recall": least_recall,
            "least_cosine": least_cosine,
            "canary_sample": canary_sample,
            **options,
        }
        return self.start_run(collection, "reindex", given(wishes))

    def start_run(
        self, collection: str, kind: str, options: Json | None = None, *, idempotency_key: str | None = None
    ) -> RunBody:
        """Return a run of any kind: reindex, index or check."""
        body = {"kind": kind, "options": options or {}}
        return self.ask(operations.START, collection, body=body, headers=make_key_header(idempotency_key))

    def run(self, run_id: str) -> RunBody:
        """Return the run as it stands now."""
        return self.ask(operations.SHOW, run_id)

    def runs(self, collection: str | None = None) -> Iterator[RunBody]:
        """Yield the runs of one collection, or of all, newest first, page by page."""
        here = operations.LIST.path if collection is None else fill_path(operations.LIST_OF.path, collection)
        return self.pages(RunBody, here, {})

    def wait_run(
        self,
        run_id: str,
        on_poll: Callable[[RunBody], None] | None = None,
        *,
        poll_seconds: float = 0.5,
        timeout_seconds: float | None = None,
    ) -> RunBody:
        """Poll until the run ends or is held and return it; `on_poll` gets every answer, the last one too.

        Raises WaitTimeout after `timeout_seconds`; the run itself goes on.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            run = self.run(run_id)
            if on_poll is not None:
                on_poll(run)
            if run["state"] in (*TERMINAL_RUN_STATES, HELD):
                return run
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"Run {run_id} is still {run['state']} after {timeout_seconds:g} s; it goes on."
                )
            self.pause_for(poll_seconds)

    def cancel_run(self, run_id: str) -> RunBody:
        """Stop it and the job that encodes for it; what it has written until then stays."""
        return self.ask(operations.CANCEL, run_id)

    def confirm_run(self, run_id: str) -> RunBody:
        """Let a held run do what it was held for."""
        return self.ask(operations.CONFIRM, run_id)
