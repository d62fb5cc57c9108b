"""What every process of `tests.forking.FORKS` finds imported and worked out. Imported by the server that forks them.

One list for all, as Python keeps one such server a process: of two lists the last one counted, and the victims of
crashes imported everything anew, 1 to 2 s each.
"""

import gc
from importlib import import_module

from tests.statements import named_patterns
from vectormill.db.session import make_engine

PRELOADED = (
    "pytest",  # the main module, which a forked process imports again, imports it
    "tests.integration.crashes.victims",
    "torch",
    "transformers",
    "worker.parallel.shard_encoder",
)

for name in PRELOADED:
    import_module(name)
named_patterns()
make_engine("postgresql+psycopg://nobody@/nothing", application_name="none").dispose()  # imports the driver
gc.freeze()  # or the first collection in a process would write to, and so copy, all of this
