"""`make mutants`: apply mutants of the product, one at a time, and check that the named tests fail for each.

Mutants are applied in a copy of the tree, which must pass the same tests unchanged. A mutant that survives is
an error, and so is one whose text is no longer there. Arguments choose mutants by a part of their name,
`--since REV` those whose file or tests have changed since that revision, and `--jobs N` tries N of them side
by side.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1  # pytest's exit codes; anything above means that no test was run
PATIENCE_SECONDS = 600


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


def run_test(tree: Path, test: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()],
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
        raise LookupError(f"its text occurs {count} times in {mutant.file}; mend tests/mutants/table.py")
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


def judge(tree: Path, mutant: Mutant) -> list[str]:
    """Return the complaints about a mutant; none when each of its tests failed."""
    complaints = []
    try:
        with mutated(tree, mutant):
            for test in mutant.tests:
                ended = run_test(tree, test)
                if ended.returncode == PASSED:
                    complaints.append(f"SURVIVED {test.split()[0].rpartition('::')[2]}")
                elif ended.returncode != FAILED:
                    complaints.append(f"no test was run: {ended.stdout[-2000:]}{ended.stderr[-500:]}")
    except LookupError as error:
        complaints.append(str(error))
    return complaints


def choose(parts: Sequence[str], since: str | None) -> list[Mutant]:
    """Return the mutants with one of these parts in their name and a file or test changed since a revision.

    Without parts every name matches; without a revision every file does.
    """
    chosen = [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]
    if since is None:
        return chosen
    changed = {
        *list_paths("diff", "--name-only", since),
        *list_paths("ls-files", "--others", "--exclude-standard"),
    }
    return [
        mutant
        for mutant in chosen
        if changed & {mutant.file, *(test.split("::")[0] for test in mutant.tests)}
    ]


def find_failure(tree: Path, mutants: Sequence[Mutant]) -> str | None:
    """Return the output of a test that fails without any mutant; None when all pass."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    together = " ".join(test for test in tests if " " not in test)  # the others have options of their own
    for several in filter(None, [together, *(test for test in tests if " " in test)]):
        ended = run_test(tree, several)
        if ended.returncode != PASSED:
            return ended.stdout
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Try mutants of the product."
    )
    parser.add_argument("parts", nargs="*", help="Try mutants whose name contains one of these.")
    parser.add_argument(
        "--since", metavar="REV", help="Try those whose file or tests changed since this revision."
    )
    parser.add_argument("--jobs", type=int, default=1, help="Try this number of mutants side by side.")
    options = parser.parse_args(arguments)
    mutants = choose(options.parts, options.since)
    with (
        tempfile.TemporaryDirectory(prefix="vectormill-mutants-") as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        Path(name).chmod(0o755)
        trees: queue.Queue[Path] = queue.Queue()
        copies = [Path(name) / str(number) for number in range(options.jobs)]
        for copy in copies:
            copy.mkdir(mode=0o755)
            copy_tree(copy)
            trees.put(copy)
        if failure := find_failure(copies[0], mutants):
            print(f"A test fails before anything is removed:\n{failure[-3000:]}", file=sys.stderr)
            return 2

        def attempt(mutant: Mutant) -> list[str]:
            tree = trees.get()
            try:
                return judge(tree, mutant)
            finally:
                trees.put(tree)

        num_bad = 0
        for mutant, complaints in zip(mutants, pool.map(attempt, mutants), strict=True):
            print(f"{'SURVIVES' if complaints else 'killed'}: {mutant.name} ({mutant.file})", flush=True)
            num_bad += bool(complaints)
            for complaint in complaints:
                print(f"  {complaint}", flush=True)
    print(
        f"{len(mutants) - num_bad} of {len(mutants)} mutants were killed by every test that must kill them."
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
