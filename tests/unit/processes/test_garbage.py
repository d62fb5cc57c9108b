"""Garbage collection of a process that lives long leaves alone what lives as long as the process."""

import subprocess
import sys

PROGRAM = """
import gc
import indexer.main
from vectormill.processes.garbage import collect_seldom
collect_seldom()
known = gc.get_freeze_count()
scanned = []
gc.callbacks.append(lambda phase, info: scanned.append(info))
rows = [[number] for number in range(15_000)]
print(known > 20_000, len(gc.get_objects()) < 20_000, len(scanned))
"""


def test_neither_libraries_nor_a_batch_of_rows_is_scanned_again() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True", "0"]
