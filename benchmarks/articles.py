"""A user's table of texts, and the systems that keep an index of it in step: our stack and CocoIndex."""

import json
import os
import select
import subprocess
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from sqlalchemy import make_url

from benchmarks.harness import ROOT, BenchmarkFailed
from benchmarks.ours import OwnStack
from benchmarks.peers import prepare_environment
from benchmarks.texts import list_distinct_lines
from vectormill.client import Client
from vectormill.processes.logs import open_log, tail_of

TABLE: Final = "articles"
COLLECTION: Final = "docs"
LANGUAGES: Final = ("en", "de", "fr", "it")
ANSWER_SECONDS: Final = 3600.0
STOP_SECONDS: Final = 15.0
# The source reads the table by the user's column names, with metadata in two columns.
OPTIONS: Final = {
    "query": f"SELECT key, body, lang, year FROM {TABLE}", "key": "key", "text": "body", "metadata": ["lang", "year"],
}  # fmt: skip
CREATE: Final = (
    f"CREATE TABLE {TABLE} (key text PRIMARY KEY, body text NOT NULL, lang text NOT NULL, year int NOT NULL)"
)
# Change rows spread evenly over the table, other ones in each round; no text is used twice.
CHANGE_TEXTS: Final = f"""
    UPDATE {TABLE} SET body = body || ' (revision ' || %(round)s::integer || ')'
     WHERE abs(hashtext(key)::bigint) %% 100 = %(round)s::integer %% 100
"""
CHANGE_METADATA: Final = f"""
    UPDATE {TABLE} SET year = year + 1 WHERE key IN (SELECT key FROM {TABLE} ORDER BY hashtext(key) LIMIT %(count)s)
"""


class OwnIndex:
    """A whole stack of ours whose collection follows a table in the stack's own Postgres."""

    name = "ours"

    def __init__(self, directory: Path) -> None:
        self._stack = OwnStack(directory)

    def __enter__(self) -> Self:
        self._stack.__enter__()
        self.url = self._stack.url
        self.client = Client(self.url, timeout=ANSWER_SECONDS)
        url = make_url(self._stack.running.database_url)
        self.dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.execute(CREATE)
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self._stack.__exit__()

    def execute(self, statement: str, **values: object) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode(), values or None)

    def fill(self, num_rows: int) -> None:
        """Insert `num_rows` real lines of text, all different."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            with connection.cursor().copy(
                f"COPY {TABLE} (key, body, lang, year) FROM STDIN".encode()
            ) as copy:
                for number, item in enumerate(islice(list_distinct_lines(num_rows), num_rows)):
                    copy.write_row((item["key"], item["text"], LANGUAGES[number % 4], 2000 + number % 25))
            connection.execute(f"ANALYZE {TABLE}".encode())

    def follow(self, **options: Any) -> None:
        """Create the collection that follows the table."""
        self.client.create_collection(COLLECTION, **options)
        self.client.set_source(COLLECTION, "sql", OPTIONS)

    def update(self, **spec: Any) -> float:
        """Start a run that updates the index; return the seconds from its creation to its end."""
        run = self.client.reindex(COLLECTION, confirm=True, **spec)
        run = self.client.wait_run(run["id"], poll_seconds=0.02)
        if run["state"] != "completed":
            raise BenchmarkFailed(f"The run ended {run['state']}: {run['error']}")
        finished, created = (
            datetime.fromisoformat(run[name] or "") for name in ("finished_at", "created_at")
        )
        return (finished - created).total_seconds()


class CocoIndex:
    """The peer CocoIndex, in a separate environment and process, with the model at `model`."""

    name = "CocoIndex"

    def __init__(self, dsn: str, model: Path, directory: Path) -> None:
        self._order = {"database_url": dsn, "model": str(model), "table": TABLE}
        self._state = directory / "cocoindex.db"
        self._log = directory / "cocoindex.log"

    def __enter__(self) -> Self:
        python = prepare_environment("cocoindex")
        quiet = {"COCOINDEX_DISABLE_USAGE_TRACKING": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [str(python), "-m", "benchmarks.children.cocoindex_flow", json.dumps(self._order)]
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, "COCOINDEX_DB": str(self._state), **quiet},
            )  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def update(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"update\n")
        self._process.stdin.flush()
        is_there = select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]
        line = self._process.stdout.readline() if is_there else b""
        if not line:
            raise BenchmarkFailed(f"CocoIndex gave no answer:{tail_of(self._log)}")
        return float(json.loads(line)["seconds"])
