"""Record whether a test run came to its end, so that its failed tests may be repeated by themselves.

A run that was interrupted, for example by the death of a test process, says nothing about the tests that it
did not reach.
"""

from typing import Any, Final

import pytest

KEY: Final = "vectormill/unfinished"
BROKEN_OFF: Final = "The last run of the tests was broken off before its end; run all of them again."


class Completeness:
    """A pytest plugin that notes in pytest's cache how many tests the last run left unfinished.

    Raise UsageError when only failed tests are requested (`--lf`) and the last run was not complete.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._cache = config.cache
        self._is_repetition = bool(config.getoption("lf"))
        self._wanted: set[str] = set()
        self._ended: set[str] = set()

    def pytest_sessionstart(self) -> None:
        assert self._cache is not None
        if self._is_repetition:
            if self._cache.get(KEY, 1):
                raise pytest.UsageError(BROKEN_OFF)
        else:
            self._cache.set(KEY, 1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._wanted |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._wanted |= set(ids)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended.add(nodeid)

    def pytest_sessionfinish(self) -> None:
        if not self._is_repetition and self._wanted:
            assert self._cache is not None
            self._cache.set(KEY, len(self._wanted - self._ended))
