"""`wait(progress=True)`: a bar in a terminal, one in a notebook that its page keeps, and nothing elsewhere."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.unit.client.test_calls import Ask, ask

__all__ = ["ask"]  # the fixture of both clients

RUNNING = {
    "id": "j",
    "state": "running",
    "num_items": 8,
    "num_done": 3,
    "num_failed": 1,
    "items_per_second": 2.0,
    "waiting_because": "no worker of <m> is alive",
}
COMPLETED = RUNNING | {"state": "completed", "num_done": 7, "waiting_because": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CapturingDisplayPublisher]:
    """What a notebook displays: IPython's own shell, which has a kernel. It keeps no history in the user's home."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.kernel = object()  # type: ignore[attr-defined]
    shell.display_pub = CapturingDisplayPublisher(parent=shell)  # type: ignore[no-untyped-call]
    try:
        yield shell.display_pub
    finally:
        InteractiveShell.clear_instance()


def wait(ask: Ask, **options: bool) -> None:
    answers = iter([RUNNING, COMPLETED])
    job = ask(lambda request: httpx.Response(200, json=next(answers)), "wait", "j", **options)
    assert job["state"] == "completed"


def test_a_terminal_has_a_bar(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    wait(ask, progress=True)
    assert "completed" in terminal.getvalue()
    assert "8 of 8 items" in terminal.getvalue()


def test_a_notebook_has_one_bar_that_changes_and_is_a_line_where_no_page_is(
    ask: Ask, notebook: CapturingDisplayPublisher
) -> None:
    wait(ask, progress=True)
    first, last = notebook.outputs
    assert (first.get("update", False), last["update"]) == (False, True)
    assert first["transient"] == last["transient"]  # the same place
    assert first["data"]["text/plain"] == "running: 4 of 8 items · 1 failed · 2/s"
    assert '<progress max="1" value="0.5000"' in first["data"]["text/html"]
    assert "no worker of &lt;m&gt; is alive" in first["data"]["text/html"]
    assert "completed" in last["data"]["text/html"]
    assert "no worker" not in last["data"]["text/html"]


def test_nothing_is_shown_where_nobody_looks_on_or_nobody_asked(
    ask: Ask, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(ask, progress=True)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    wait(ask)
    assert terminal.getvalue() == ""
