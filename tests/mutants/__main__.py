"""`make mutants`: removes what must not be removed, one line at a time, and shows which test fails for each.

Works in a copy of the tree, which must pass the same tests before anything is removed. A mutant that survives is an
error, and so is one whose line is no longer there. Names as arguments choose mutants by a part of their name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1  # pytest's; everything above means that it did not get as far as the tests
PATIENCE_SECONDS = 600


def copy_tree(target: Path) -> None:
    """What git tracks, and what is new beside it; not what is built or installed."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in (
        subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    ):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_test(tree: Path, test: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()],
        cwd=tree,
        # The installed packages are links into the tree that we copied: the copy comes first.
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def mutate(source: str, mutant: Mutant) -> str:
    """Raises LookupError unless the mutant's text is there exactly once."""
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
    """The complaints: none when every test of this mutant failed."""
    complaints = []
    try:
        with mutated(tree, mutant):
            for test in mutant.tests:
                ended = run_test(tree, test)
                name = test.split()[0].rpartition("::")[2]
                if ended.returncode == PASSED:
                    complaints.append(f"SURVIVED {name}")
                elif ended.returncode != FAILED:
                    complaints.append(f"no test was run: {ended.stdout[-2000:]}{ended.stderr[-500:]}")
                else:
                    print(f"  killed by {name}", flush=True)
    except LookupError as error:
        complaints.append(str(error))
    return complaints


def main(wanted: Sequence[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if not wanted or any(part in mutant.name for part in wanted)]
    with tempfile.TemporaryDirectory(prefix="vectormill-mutants-") as name:
        tree = Path(name)
        tree.chmod(0o755)
        copy_tree(tree)
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        together = " ".join(test for test in tests if " " not in test)  # the others have options of their own
        for several in filter(None, [together, *(test for test in tests if " " in test)]):
            ended = run_test(tree, several)
            if ended.returncode != PASSED:
                print(f"A test fails before anything is removed:\n{ended.stdout[-3000:]}", file=sys.stderr)
                return 2
        num_bad = 0
        for number, mutant in enumerate(mutants, 1):
            print(f"{number}/{len(mutants)} {mutant.name} ({mutant.file})", flush=True)
            complaints = judge(tree, mutant)
            num_bad += bool(complaints)
            for complaint in complaints:
                print(f"  {complaint}", flush=True)
    print(
        f"{len(mutants) - num_bad} of {len(mutants)} mutants were killed by every test that must kill them."
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
