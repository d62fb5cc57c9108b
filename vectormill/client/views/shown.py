"""Shown: where a person looks on, a bar of a job's progress: in a terminal or a notebook. Elsewhere nothing."""

import html
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from vectormill.client.views.job_progress import look_at_job
from vectormill.client.views.look import Look

Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def showing() -> Iterator[Show]:
    """Call it with each answer of the API."""
    if is_notebook():
        yield NotebookBar()
    elif sys.stderr.isatty():
        from vectormill.client.views.progress import Progress  # rich takes a twentieth of a second

        with Progress(look_at_job) as progress:
            yield progress
    else:
        yield lambda job: None


def is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: it shows displayed objects and no terminal control characters."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Handle(Protocol):
    """The handle that IPython returns for something displayed, through which it is updated."""

    def update(self, shown: Any, *, raw: bool) -> None: ...


class NotebookBar:
    """One line and a bar under the cell, written anew with each answer; no widget: it is saved with the page."""

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def __call__(self, job: Mapping[str, Any]) -> None:
        shown = describe_look(look_at_job(job))
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        from IPython.display import display

        self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def describe_look(look: Look) -> dict[str, str]:
    """Return the view by media type: a bar in HTML, and a line of plain text."""
    reason = f"<br><small>{html.escape(look.reason)}</small>" if look.reason else ""
    share = "" if look.share is None else f' value="{look.share:.4f}"'
    return {
        "text/plain": look.line,
        "text/html": f'<progress max="1"{share} style="width: 20em"></progress> '
        f"{html.escape(look.stage)} {html.escape(look.counts)}{reason}",
    }
