"""The release before this one: its code from git's history, a database that it filled, and a process of it.

No release was made yet, so the commit that added the first migration stands for it.
"""

import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.sources import ROOT

FIRST_MIGRATION: Final = "alembic/versions/0026_schema.py"

# This program runs with the code of the release before. It creates jobs in every stage with that release's
# test helpers.
FILL: Final = """
import sys
from sqlalchemy import create_engine, text
from tests.protocol import LONG, claim_next, complete, make_items, register_worker, submit
from vectormill.db.migrations import upgrade
from vectormill.jobs.item import Item, ItemFailure

url = sys.argv[1]
upgrade(url)
engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
register_worker(engine)
for name in ("docs", None):
    items = [*make_items(5, "done"), Item("cut", LONG + b"text"), Item("ill", b"")]
    job = submit(engine, items, collection=name)
    while True:
        claimed = claim_next(engine)
        is_last = claimed.num_items < 4
        if complete(engine, claimed, {2: ItemFailure("empty_text", "It is empty.")} if is_last else None):
            break
submit(engine, make_items(9, "open"), collection="docs")
assert complete(engine, claim_next(engine)) is False
claim_next(engine, lease_seconds=1)
with engine.begin() as connection:
    for line in sys.stdin.read().split(";"):
        if line.strip():
            connection.execute(text(line))
"""
# Rows for the tables that jobs do not fill.
OTHER_ROWS: Final = """
INSERT INTO vectormill.calibrations (fingerprint, ranges) VALUES ('space', '\\x0102');
INSERT INTO vectormill.heartbeats (duty, beat_at) VALUES ('scheduler', now());
INSERT INTO vectormill.api_keys (name, hash, scope) VALUES ('laptop', '\\xabcd', 'write');
INSERT INTO vectormill.idempotency_keys (operation, idempotency_key, content_hash) VALUES ('files', 'once', '\\x01');
INSERT INTO vectormill.sources (collection_id, kind, options)
SELECT id, 'sql', '{"query": "SELECT 1", "key": "id", "text": "body"}' FROM vectormill.collections;
INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, next_due_at)
SELECT 'nightly', id, '0 2 * * *', 'Europe/Berlin', 'skip', now() + interval '1 day' FROM vectormill.collections;
INSERT INTO vectormill.runs (id, collection_id, kind, state, num_new, finished_at)
SELECT gen_random_uuid(), id, 'reindex', 'completed', 7, now() FROM vectormill.collections;
INSERT INTO vectormill.run_parts (run_id, seq, num_items, items) SELECT id, 0, 1, '\\x01' FROM vectormill.runs;
INSERT INTO vectormill.tombstones (collection_id, key, seq) SELECT id, 'gone', 1 FROM vectormill.collections;
INSERT INTO vectormill.source_changes (collection_id, key) SELECT id, 'changed' FROM vectormill.collections;
INSERT INTO vectormill.request_files (id, state, purpose, filename)
VALUES (gen_random_uuid(), 'processed', 'batch', 'lines.jsonl');
INSERT INTO vectormill.request_file_parts (file_id, seq, num_bytes, content)
SELECT id, 0, 1, '\\x01' FROM vectormill.request_files;
INSERT INTO vectormill.request_batches
       (id, state, endpoint, input_file_id, completion_window, content_hash, expires_at, finished_at)
SELECT gen_random_uuid(), 'completed', '/v1/embeddings', id, '24h', '\\x01', now(), now() FROM vectormill.request_files;
INSERT INTO vectormill.request_refusals (batch_id, line, code, message)
SELECT id, 1, 'empty_text', 'It is empty.' FROM vectormill.request_batches;
INSERT INTO vectormill.webhooks (url, events, secret) VALUES ('http://localhost:1/', '{job.completed}', 'whsec');
INSERT INTO vectormill.webhook_deliveries (webhook_id, event_type, payload)
SELECT id, 'job.completed', '{}' FROM vectormill.webhooks
"""


def extract_release(tree: Path) -> None:
    """Write the code of the release before into a folder. Skip the test where git has no history."""
    found = _ask_git("log", "--diff-filter=A", "--format=%H", "-1", "--", FIRST_MIGRATION)
    with tarfile.open(fileobj=BytesIO(_ask_git("archive", found.decode().strip()))) as archive:
        archive.extractall(tree, filter="data")


def _ask_git(*arguments: str) -> bytes:
    asked = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if asked.returncode != 0 or not asked.stdout:
        # An archive of the sources, or a shallow clone, does not have the commit of that release.
        pytest.skip(f"git has no history here: {asked.stderr.decode(errors='replace').strip()}")
    return asked.stdout


def fill_as_release(tree: Path, database_url: str) -> None:
    """Write rows into every table of an empty database, migrated by the release's code in that folder."""
    done = subprocess.run(
        [sys.executable, "-c", FILL, database_url],
        input=OTHER_ROWS,
        cwd=tree,
        env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


# This program runs with the code of the release before. It claims and carries out work on command, and prints
# 1 if it holds a claim, else 0.
CARRY_OUT: Final = """
import sys
from tests.work_users import USERS
from vectormill.db.session import make_engine

engine = make_engine(sys.argv[1], application_name="the release before", pool_size=2)
users = {type(user).__name__: user for user in USERS}
for line in sys.stdin:
    command, name = line.split()
    user = users[name]
    if command == "claim":
        with engine.begin() as connection:
            claimed = user.claim(connection)
    else:
        user.carry_out(engine, claimed)
    print(int(claimed is not None), flush=True)
"""


@contextmanager
def former_process(tree: Path, database_url: str) -> Iterator[Callable[[str], int]]:
    """Start a process with the release's code in that folder; yield a function that sends it a command.

    The function returns the process's answer: 1 if it holds a claim, else 0.
    """
    with subprocess.Popen(
        [sys.executable, "-c", CARRY_OUT, database_url],
        cwd=tree,
        env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asking, answers = process.stdin, process.stdout

        def tell(command: str) -> int:
            print(command, file=asking, flush=True)
            return int(answers.readline())

        yield tell
