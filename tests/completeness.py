"""Let the tests that a run did not reach be repeated together with those that failed.

When a test process dies, the run ends at once and says nothing about the tests that are left. They are added
to those that pytest's `--last-failed` selects. A run whose controlling process was killed leaves no such list,
so nothing may be repeated after it.
"""

from typing import Any, Final

import pytest

KEY: Final = "vectormill/is_unfinished"
LAST_FAILED: Final = "cache/lastfailed"  # where pytest keeps the tests that failed
BROKEN_OFF: Final = "The last run of the tests was broken off before its end; run all of them again."


class Completeness:
    """A pytest plugin that adds the tests that a run did not reach to pytest's list of failed tests.

    Raise UsageError when only failed tests are requested (`--lf`) and the last run left no such list.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._cache = config.cache
        self._is_repetition = bool(config.getoption("lf"))
        self._wanted: set[str] = set()
        self._ended: set[str] = set()

    def pytest_sessionstart(self) -> None:
        assert self._cache is not None
        if self._is_repetition:
            if self._cache.get(KEY, True):
                raise pytest.UsageError(BROKEN_OFF)
        else:
            self._cache.set(KEY, True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._wanted |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._wanted |= set(ids)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended.add(nodeid)

    @pytest.hookimpl(trylast=True)  # after pytest has written its own list
    def pytest_sessionfinish(self) -> None:
        if not self._is_repetition and self._wanted:
            assert self._cache is not None
            unreached = dict.fromkeys(self._wanted - self._ended, True)
            self._cache.set(LAST_FAILED, self._cache.get(LAST_FAILED, {}) | unreached)
            self._cache.set(KEY, False)
