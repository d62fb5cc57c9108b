"""Modules and caches that every process of `tests.forking.FORKS` inherits from the server that forks it.

There is one list for all tests because Python keeps one such server per process. With two lists only the last
one counted, and the victims of crash tests imported everything again, 1 to 2 s each.
"""

import gc
from importlib import import_module

from tests.statements import named_patterns
from vectormill.db.session import make_engine

PRELOADED = (
    "pytest",  # the main module, which a forked process imports again, imports pytest
    "tests.integration.crashes.victims",
    "torch",
    "transformers",
    "worker.parallel.shard_encoder",
)

for name in PRELOADED:
    import_module(name)
named_patterns()
make_engine("postgresql+psycopg://nobody@/nothing", application_name="none").dispose()  # imports the driver
gc.freeze()  # the first collection in a process would otherwise write to, and so copy, all of this
