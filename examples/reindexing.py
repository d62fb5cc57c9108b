"""Keep a table searchable: index it, change a few rows, and index only the differences.

    VECTORMILL_WORKER_PROOF_SECONDS=1 vectormill up    # in another terminal, in the same folder
    python examples/reindexing.py

The table holds docstrings and lies in `library.db`, a file of SQLite that this script makes beside `library.url`. The
same by commands: `vectormill sources set library --sql … --url-file library.url`, then `vectormill reindex library`.
A renamed row keeps its vector, if the worker has shown since that it computes right: with this setting every second.
"""

import sqlite3
import time
from datetime import datetime
from pathlib import Path

from vectormill import Client
from vectormill.corpus import read_docstrings, take_evenly

COLLECTION = "library"
NUM_ROWS = 1000
# Each changes some rows of a hundredth of the table.
CHANGES = {
    "another text": "UPDATE library SET docstring = docstring || ' (Edited.)' WHERE lot = 0",
    "other metadata": "UPDATE library SET depth = depth + 10 WHERE lot = 1",
    "renamed": "UPDATE library SET name = name || '.renamed' WHERE lot = 2",
    "deleted": "DELETE FROM library WHERE lot = 3",
    "new": "INSERT INTO library SELECT name || '.new', docstring || ' (New.)', module, depth, 5 FROM library "
    "WHERE lot = 4",
}
COUNTS = ("unchanged", "new", "changed", "metadata_only", "moved", "deleted")

database, url = Path("library.db").resolve(), Path("library.url").resolve()
database.unlink(missing_ok=True)
url.write_text(f"sqlite:///{database}")
table = sqlite3.connect(database, isolation_level=None)
table.execute(
    "CREATE TABLE library (name TEXT PRIMARY KEY, docstring TEXT, module TEXT, depth INTEGER, lot INTEGER)"
)
rows = [
    (each.key, each.text, each.key.partition(".")[0], each.key.count(".") + 1, number % 100)
    for number, each in enumerate(take_evenly(list(read_docstrings()), NUM_ROWS))
]
table.executemany("INSERT INTO library VALUES (?, ?, ?, ?, ?)", rows)

with Client() as client:
    if COLLECTION not in [each["name"] for each in client.collections()]:
        client.create_collection(COLLECTION)
    source = {
        "query": "SELECT name, docstring, module, depth FROM library",
        "key": "name",
        "text": "docstring",
    }
    client.set_source(COLLECTION, "sql", source | {"metadata": ["module", "depth"], "url_file": str(url)})

    def reindex(title: str) -> None:
        run = client.wait_run(client.reindex(COLLECTION)["id"])
        assert run["state"] == "completed", run
        start, end = (datetime.fromisoformat(str(run[name])) for name in ("created_at", "finished_at"))
        counts = (f"{run['counts'][f'num_{name}']} {name}" for name in COUNTS)
        print(f"{title}: {', '.join(counts)}, {(end - start).total_seconds():.2f} s")

    reindex("first run")
    # Renamed rows keep their vectors only once the worker has encoded known texts again, which no answer tells.
    time.sleep(5)
    print("changes:", ", ".join(f"{table.execute(sql).rowcount} {what}" for what, sql in CHANGES.items()))
    reindex("after the changes")
    reindex("nothing changed")
    print("\nNearest to: how to parse a date, in some modules")
    modules = {"module": {"in": ["datetime", "time", "calendar", "email"]}}
    for match in client.search(COLLECTION, "how to parse a date", filter=modules, limit=5):
        print(f"{match['score']:.3f}", match["key"], match["metadata"])
