"""FORKS starts processes as `multiprocessing` does, in milliseconds and safely.

They are forked from a server that has imported the modules of tests.forked and has no threads.
"""

import multiprocessing
from typing import Final

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.forked"])
