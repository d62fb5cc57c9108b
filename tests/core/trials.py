"""Mutants are applied one at a time in a copy of the tree, and tests are run there until one fails."""

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.core.mutants import Mutant
from tests.core.records import ROOT

PASSED, FAILED = 0, 1  # pytest's exit codes; anything above means that no test was run
PATIENCE_SECONDS = 900
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: the test that failed, if one did, or the reason why none could be run."""

    killer: str | None
    complaint: str = ""


def list_paths(*command: str) -> list[str]:
    """Return the paths that a git command prints."""
    ended = subprocess.run(["git", *command, "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return ended.stdout.split("\0")[:-1]


def copy_tree(target: Path) -> None:
    """Copy tracked and new files of the tree, but nothing that is built or installed."""
    for name in list_paths("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        # The installed packages are links into the original tree, so the copy must come first.
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def mutate(source: str, mutant: Mutant) -> str:
    """Return the file's text with the mutant applied.

    Raise LookupError unless its text occurs exactly once.
    """
    count = source.count(mutant.text)
    if count != 1:
        raise LookupError(f"its text occurs {count} times in {mutant.file}; mend tests/core/mutants.py")
    return source.replace(mutant.text, mutant.instead)


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    file = tree / mutant.file
    original = file.read_text(encoding="utf-8")
    file.write_text(mutate(original, mutant), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(original, encoding="utf-8")


def judge(tree: Path, mutant: Mutant, tests: Sequence[str]) -> Verdict:
    """Return the first of the tests that fails with the mutant and passes without it."""
    left = list(tests)
    if not left:
        return Verdict(None, "no recorded test ran its line, or only such as take too long")
    try:
        while left:
            with mutated(tree, mutant):
                ended = run_tests(tree, left)
            if ended.returncode == PASSED:
                return Verdict(None)
            failure = FIRST_FAILURE.search(ended.stdout)
            if ended.returncode != FAILED or failure is None or failure[1] not in left:
                return Verdict(None, f"no test was run: {ended.stdout[-2000:]}{ended.stderr[-500:]}")
            if run_tests(tree, [failure[1]]).returncode == PASSED:
                return Verdict(failure[1])
            left.remove(failure[1])
    except (LookupError, subprocess.TimeoutExpired) as error:
        return Verdict(None, str(error))
    return Verdict(None, "no test that passes without it was tried")


def try_all(
    trials: Sequence[tuple[Mutant, Sequence[str]]], num_jobs: int
) -> Iterator[tuple[Mutant, Verdict]]:
    """Yield each mutant with its verdict, in the given order, `num_jobs` being tried side by side."""
    with (
        tempfile.TemporaryDirectory(prefix="vectormill-mutants-") as name,
        ThreadPoolExecutor(num_jobs) as pool,
    ):
        Path(name).chmod(0o755)
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(num_jobs):
            copy = Path(name) / str(number)
            copy.mkdir(mode=0o755)
            copy_tree(copy)
            trees.put(copy)

        def attempt(trial: tuple[Mutant, Sequence[str]]) -> tuple[Mutant, Verdict]:
            tree = trees.get()
            try:
                return trial[0], judge(tree, *trial)
            finally:
                trees.put(tree)

        yield from pool.map(attempt, trials)
