"""Commands of the command line, run in this process."""

import pytest

from vectormill.cli.app import main


def run(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)
