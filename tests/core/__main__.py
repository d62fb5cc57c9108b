"""Choose the tests of `make test`, the core, by what they cost and what they notice.

A new or changed test enters by three steps: `record PATH`, `kill` and `choose`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tests.core.choice import choose_core, find_fault_tests
from tests.core.mutants import MUTANTS, Mutant
from tests.core.records import FOLDER, ROOT, SETTINGS, TESTS, list_tests, read_lines, read_seconds
from tests.core.table import CoreTest, read_table, write_table
from tests.core.trials import list_paths, try_all

# What `kill` found, a line each; it may be stopped at any time, and goes on from there.
KILLS: Final = FOLDER / "kills.jsonl"
# If the mutants themselves have changed, which ones is not known.
TABLE: Final = "tests/core/mutants.py"
# A killer this cheap is not worth a search for a cheaper one.
CHEAP_SECONDS: Final = 0.5
# The tests that are tried for one mutant take at most this long together.
SEARCH_SECONDS: Final = 120.0


def record(options: argparse.Namespace) -> int:
    """Run tests, and record the processor seconds of each and the lines that its processes run."""
    if not options.parts:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    recording = {"TESTS_RECORDED_IN": str(FOLDER), "COVERAGE_PROCESS_START": str(SETTINGS)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.core.recorder", "-q", "-m", options.marks]
    command += [f"--numprocesses={options.jobs}", "--dist=loadfile", "--max-worker-restart=0"]
    command += options.parts or TESTS
    return subprocess.run(command, cwd=ROOT, env=os.environ | recording, check=False).returncode


def kill(options: argparse.Namespace) -> int:
    """Find a test that kills each mutant: one of the core if any does, otherwise the cheapest."""
    seconds, lines, killers = read_seconds(), read_lines(), read_killers()
    core = set(choose_core(seconds, lines, list(find_cases(find_fault_tests(), seconds))))
    trials = []
    for mutant in pick_mutants(options):
        known = [seconds[test] for test in killers[mutant.name] if test in seconds]
        if killers[mutant.name] & core or min(known, default=SEARCH_SECONDS) <= CHEAP_SECONDS:
            continue
        tests = find_runners(mutant, lines) & seconds.keys()
        order = sorted(tests, key=lambda test: (test not in core, seconds[test]))
        trials.append((mutant, list(take(order, seconds, core, most=min(known, default=SEARCH_SECONDS)))))
    num_alive = 0
    with KILLS.open("a", encoding="utf-8") as file:
        for mutant, verdict in try_all(trials, options.jobs):
            print(f"{mutant.name}: {verdict.killer or verdict.complaint or 'survives'}", flush=True)
            if verdict.killer is not None:
                file.write(json.dumps({"mutant": mutant.name, "killer": verdict.killer}) + "\n")
                file.flush()
            elif not killers[mutant.name]:
                num_alive += 1
    return 1 if num_alive else 0


def find_runners(mutant: Mutant, lines: Mapping[str, Mapping[str, int]]) -> set[str]:
    """Return the tests that ran a line of the mutant; all that ran its file if the line runs at its import."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    first = source[: source.index(mutant.text)].count("\n") + 1
    changed = sum(1 << line for line in range(first, first + mutant.text.count("\n") + 1))
    ran = {test for test, files in lines.items() if files.get(mutant.file, 0) & changed}
    return ran or {test for test, files in lines.items() if mutant.file in files}


def take(tests: Iterable[str], seconds: Mapping[str, float], core: set[str], *, most: float) -> Iterator[str]:
    """Yield the tests of the core and those cheaper than `most`, for as long as they may take together."""
    spent = 0.0
    for test in tests:
        if test in core or seconds[test] < most:
            spent += seconds[test]
            if spent > SEARCH_SECONDS:
                return
            yield test


def choose(options: argparse.Namespace) -> int:
    """Write docs/core.tsv: the cheapest tests found that notice what all recorded tests notice.

    Tests of the table that were not recorded stay in it, and tests that are no longer there leave it.
    """
    present, former, killers = list_tests(), read_table(), read_killers()
    seconds = {test: cost for test, cost in read_seconds().items() if test in present}
    kept = [row for row in former.values() if row.test in present and row.test not in seconds]
    kept_killers = {mutant for row in kept for mutant in row.mutants}
    needs = [sorted(killers[mutant.name] & seconds.keys()) for mutant in MUTANTS]
    needs += find_cases(find_fault_tests(), seconds)
    core = choose_core(seconds, read_lines(), needs)
    killed = defaultdict(list)
    alive = []
    for mutant in MUTANTS:
        if tests := killers[mutant.name].intersection(core):
            killed[min(tests, key=seconds.__getitem__)].append(mutant.name)
        elif mutant.name not in kept_killers:
            alive.append(mutant.name)
    rows = [*kept, *(CoreTest(test, seconds[test], tuple(killed[test])) for test in core)]
    write_table(rows)
    print(
        f"The core has {len(rows)} tests, which take {sum(row.seconds for row in rows):.0f} seconds; ", end=""
    )
    print(f"{len(seconds)} were recorded, which take {sum(seconds.values()):.0f}.")
    for test in sorted(former.keys() - {row.test for row in rows}):
        print(f"left the core: {test}" + ("" if test in present else ", which is no longer there"))
    chosen = {name for row in rows for name in (row.test, row.test.partition("[")[0])}
    for named in find_fault_tests():
        if chosen.isdisjoint(named):
            print(f"of a row of docs/FAULTS.md no test is in the core: {named[0]}")
    if alive:
        print("No recorded test is known to kill: " + "; ".join(alive), file=sys.stderr)
    return 1 if alive else 0


def find_cases(needs: Iterable[Sequence[str]], seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield the recorded tests of each need, where a test without parameters stands for all its cases."""
    cases = defaultdict(list)
    for test in seconds:
        cases[test].append(test)
        if "[" in test:
            cases[test.partition("[")[0]].append(test)
    for tests in needs:
        yield [case for test in tests for case in cases[test]]


def show_mutants(options: argparse.Namespace) -> int:
    """Show for each mutant that the test named in docs/core.tsv fails with it, and passes without it."""
    killers = read_killers(searched=False)
    chosen = pick_mutants(options)
    if options.since:
        changed = {
            *list_paths("diff", "--name-only", options.since),
            *list_paths("ls-files", "--others", "--exclude-standard"),
        }
        chosen = [
            mutant
            for mutant in chosen
            if changed & {TABLE, mutant.file, *(test.partition("::")[0] for test in killers[mutant.name])}
        ]
    num_bad = 0
    for mutant, verdict in try_all([(each, sorted(killers[each.name])) for each in chosen], options.jobs):
        outcome = "SURVIVES" if verdict.killer is None else "killed"
        print(f"{outcome}: {mutant.name} ({mutant.file}) {verdict.complaint}", flush=True)
        num_bad += verdict.killer is None
    print(f"{len(chosen) - num_bad} of {len(chosen)} mutants were killed.")
    return 1 if num_bad else 0


def read_killers(*, searched: bool = True) -> dict[str, set[str]]:
    """Return mutant -> the tests known to kill it, from the table and, with `searched`, from searches since."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in read_table().values():
        for mutant in row.mutants:
            found[mutant].add(row.test)
    if searched and KILLS.exists():
        for line in KILLS.read_text(encoding="utf-8").splitlines():
            kill = json.loads(line)
            found[kill["mutant"]].add(kill["killer"])
    return found


def pick_mutants(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants with one of the wanted parts in their names; raise SystemExit for a part of none."""
    parts = options.parts
    if unknown := [part for part in parts if not any(part in mutant.name for mutant in MUTANTS)]:
        raise SystemExit(f"No mutant has {unknown[0]!r} in its name: see tests/core/mutants.py.")
    return [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "record": record,
    "kill": kill,
    "choose": choose,
    "mutants": show_mutants,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.core",
        description=__doc__,
        epilog="For example: .venv/bin/python -m tests.core record tests/unit/cli, then kill, then choose.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        told = str(command.__doc__)
        child = commands.add_parser(name, help=told, description=told)
        child.add_argument("--jobs", type=int, default=2, help="Use this number of processes (2).")
        if name == "record":
            child.add_argument("parts", nargs="*", metavar="PATH", help="Tests (default: all but slow ones).")
            child.add_argument("--marks", default="not slow", help="pytest's -m ('not slow'; '' for all).")
        elif name != "choose":
            child.add_argument(
                "parts", nargs="*", metavar="PART", help="Only mutants with this in their name."
            )
        if name == "mutants":
            child.add_argument("--since", metavar="REV", help="Only those whose file or test changed since.")
    options = parser.parse_args(arguments)
    if options.command in ("kill", "choose") and not any(FOLDER.glob("costs.*")):
        raise SystemExit("Nothing was recorded here yet: run `.venv/bin/python -m tests.core record`.")
    return COMMANDS[options.command](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
