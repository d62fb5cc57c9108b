"""Which tests are the core: the cheapest found that together notice what all tests notice.

The core must kill every mutant, contain a test for each row of docs/FAULTS.md, and run each line of the product
that some test runs for less than `LINE_SECONDS`.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from tests.core.records import ROOT

# What a test costs beyond its own seconds: pytest's work for it, and the import of its file and what it starts.
TEST_SECONDS = 0.02
# What it may cost to run a line that no other test of the core runs.
LINE_SECONDS = 0.2
# A test that runs no line of the product checks the tree itself, or its processes leave no record: the dear ones do.
CHECK_SECONDS = 5.0
NAMED_TEST = re.compile(r"`(tests/[^`:]*)?::([^`\[]+)(\[[^`]*\])?`")


def choose_core(
    seconds: Mapping[str, float], lines: Mapping[str, Mapping[str, int]], killers: Sequence[Sequence[str]]
) -> list[str]:
    """Return the chosen tests: those that ran no line of the product, then those with the most new a second.

    `killers` are the tests of which one is needed whatever it costs: for each mutant those that kill it, for
    each fault those that failed before it was fixed.
    """
    checks_of_the_tree = [test for test in seconds if test not in lines and seconds[test] <= CHECK_SECONDS]
    notices = to_bits(lines)
    num_lines = max((bits.bit_length() for bits in notices.values()), default=0)
    for number, tests in enumerate(killers, num_lines):
        for test in notices.keys() & tests:
            notices[test] |= 1 << number
    noticed, core = 0, []
    # A test's worth only falls as others are chosen, so the first whose worth is still true is the best.
    queue = [(-worth(bits, seconds[test]), test) for test, bits in notices.items() if test in seconds]
    heapq.heapify(queue)
    while queue:
        promised, test = heapq.heappop(queue)
        new = notices[test] & ~noticed
        actual = worth(new, seconds[test])
        if actual < 1 / LINE_SECONDS and not new >> num_lines:
            continue
        if actual < -promised:
            heapq.heappush(queue, (-actual, test))
            continue
        noticed |= new
        core.append(test)
    return checks_of_the_tree + drop_covered(core, notices, seconds)


def worth(bits: int, seconds: float) -> float:
    return bits.bit_count() / (seconds + TEST_SECONDS)


def to_bits(lines: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return test -> a number with a bit for each line of any file: the files' bits behind one another."""
    sizes: dict[str, int] = defaultdict(int)
    for files in lines.values():
        for file, bits in files.items():
            sizes[file] = max(sizes[file], bits.bit_length())
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    return {test: sum(bits << starts[file] for file, bits in files.items()) for test, files in lines.items()}


def drop_covered(core: Sequence[str], notices: Mapping[str, int], seconds: Mapping[str, float]) -> list[str]:
    """Return the core without tests that notice nothing which the others do not, the dearest dropped first."""
    once, twice = 0, 0
    for test in core:
        twice |= once & notices[test]
        once |= notices[test]
    kept = list(core)
    for test in sorted(core, key=seconds.__getitem__, reverse=True):
        if notices[test] & ~twice:
            continue
        kept.remove(test)
        once = twice = 0
        for other in kept:
            twice |= once & notices[other]
            once |= notices[other]
    return kept


def find_fault_tests() -> Iterator[list[str]]:
    """Yield for each row of docs/FAULTS.md the tests it names, without the cases of parametrized ones."""
    for row in (ROOT / "docs" / "FAULTS.md").read_text(encoding="utf-8").splitlines():
        cells = row.split(" | ")
        if row.startswith("| ") and len(cells) >= 3:
            file, named = "", []
            for match in NAMED_TEST.finditer(cells[1]):
                file = match[1] or file
                named.append(f"{file}::{match[2]}{match[3] or ''}")
            if named:
                yield named
