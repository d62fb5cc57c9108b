"""Commands of the command line, run in this process."""

from collections.abc import Callable

import httpx
import pytest

from vectormill.cli.app import main

Say = Callable[..., str]


def run(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def saying(http: httpx.Client, capsys: pytest.CaptureFixture[str], *words: str) -> Say:
    """Return a function that runs a command of an API, checks its exit code, and returns what it says."""

    def say(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = run(*words, *arguments, "--api-url", str(http.base_url))
        shown = capsys.readouterr()
        assert ended == code, shown.err
        return shown.out + shown.err

    return say
