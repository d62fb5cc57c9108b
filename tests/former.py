"""Former releases: their code, out of git's history, and databases as they left them."""

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

# Before claims and keys had their tables, with the schema at 0004.
OLD_RELEASE: Final = "58b23b1"
# The last one before jobs came from files of requests, with the schema at 0016.
LAST_RELEASE: Final = "38cb954"
# The last one whose deliveries and batches had claims of their own.
BEFORE_LEASED_WORK: Final = "7ad9e9e"

# Run by that release's code: what it makes of jobs in every stage. Its own helpers of tests submit, claim and commit.
FILL: Final = """
import sys
from sqlalchemy import create_engine, text
from tests.protocol import LONG, claim_next, complete, make_items, register_worker, submit
from vectormill.db.migrations import upgrade
try:
    from vectormill.domain.jobs.item import Item, ItemFailure
except ModuleNotFoundError:
    from vectormill.domain.item import Item, ItemFailure

url = sys.argv[1]
upgrade(url)
engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
register_worker(engine)
for name in ("docs", None):
    items = [*make_items(5, "done"), Item("cut", LONG + b"text"), Item("ill", b"")]
    job = submit(engine, items, collection=name)
    while True:
        claimed = claim_next(engine)
        is_last = claimed.num_items < 4 if hasattr(claimed, "num_items") else claimed.first_item > 0
        if complete(engine, claimed, {2: ItemFailure("empty_text", "It is empty.")} if is_last else None):
            break
submit(engine, make_items(9, "open"), collection="docs")
assert complete(engine, claim_next(engine)) is False
claim_next(engine, lease_seconds=1)
with engine.begin() as connection:
    for line in sys.stdin.read().split(";"):
        table = line.partition("vectormill.")[2].partition(" ")[0]
        if line.strip() and connection.execute(text(f"SELECT to_regclass('vectormill.{table}')")).scalar():
            connection.execute(text(line))
"""
# Of tables that no job fills; each where that release has it.
OTHER_ROWS: Final = """
INSERT INTO vectormill.calibrations (fingerprint, ranges) VALUES ('space', '\\x0102');
INSERT INTO vectormill.heartbeats (duty, beat_at) VALUES ('scheduler', now());
INSERT INTO vectormill.api_keys (name, hash, scope) VALUES ('laptop', '\\xabcd', 'write');
INSERT INTO vectormill.sources (collection_id, kind, options)
SELECT id, 'sql', '{"query": "SELECT 1", "key": "id", "text": "body"}' FROM vectormill.collections;
INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, next_due_at)
SELECT 'nightly', id, '0 2 * * *', 'Europe/Berlin', 'skip', now() + interval '1 day' FROM vectormill.collections;
INSERT INTO vectormill.runs (id, collection_id, kind, state, num_new, finished_at)
SELECT gen_random_uuid(), id, 'reindex', 'completed', 7, now() FROM vectormill.collections;
INSERT INTO vectormill.run_parts (run_id, seq, num_items, items) SELECT id, 0, 1, '\\x01' FROM vectormill.runs;
INSERT INTO vectormill.tombstones (collection_id, key, seq) SELECT id, 'gone', 1 FROM vectormill.collections;
INSERT INTO vectormill.source_changes (collection_id, key) SELECT id, 'changed' FROM vectormill.collections
"""


def extract_release(release: str, tree: Path) -> None:
    """The code of a release in a folder. Skips the test where git has no history."""
    found = subprocess.run(["git", "-C", str(ROOT), "archive", release], capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"git has no history here: {found.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="data")


def fill_as_release(tree: Path, database_url: str) -> None:
    """Rows in every table of an empty database, made and migrated by the code in that folder."""
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


# Run by the code of BEFORE_LEASED_WORK: claims and carries out, as it is told, and answers with the number of claims.
CARRY_OUT: Final = """
import sys
import time
from sqlalchemy import text
from indexer.requests.batch_keeper import bring_on
from indexer.phases.phases import Tools, carry_out
from indexer.requests.held_batch import HeldBatch
from tests.api_server import encode_waiting
from tests.indexers import ListedSource
from tests.integration.crashes.test_killed_indexers import AFTER
from tests.obedient_engine import encoding_chunks
from tests.protocol import SPEC, dispatch_all
from vectormill.db.chunks.chunks import claim_chunk
from vectormill.db.runs.run_claims import claim_run
from vectormill.db.requests.batch_claims import claim_batch
from vectormill.db.session import make_engine
from vectormill.db.webhooks.deliveries import claim_deliveries, record_reply
from vectormill.domain.webhooks.webhook import Reply
from vectormill.models.registry import Registry
from vectormill.settings import Settings

engine = make_engine(sys.argv[1], application_name="the release before", pool_size=2)
for line in sys.stdin:
    command, user = line.split()
    if command == "claim" and user == "Deliveries":
        with engine.begin() as connection:
            claims = list(claim_deliveries(connection, {}, most=4, room=9, lease_seconds=30))
    elif command == "claim" and user == "Runs":
        with engine.begin() as connection:
            claims = [each for each in [claim_run(connection, "before", 30)] if each is not None]
    elif command == "claim" and user == "Chunks":
        dispatch_all(engine)
        with engine.begin() as connection:
            chunk_id = connection.execute(text("SELECT id FROM vectormill.chunks")).scalar_one()
            claimed = claim_chunk(connection, chunk_id, "before", SPEC.model, 30)
        claims = [] if claimed is None else [claimed]
    elif command == "claim":
        with engine.begin() as connection:
            claims = [each for each in [claim_batch(connection, "before", 30)] if each is not None]
    elif user == "Deliveries":
        with engine.begin() as connection:
            record_reply(connection, claims[0], Reply(200), None)
    elif user == "Chunks":
        with encoding_chunks(engine) as encoder, encoder._timesheet.hold(claims[0].claim.job_id):
            encoder._encode_claimed(claims[0], time.monotonic())
    elif user == "Runs":
        wait = lambda _: encode_waiting(engine)
        tools = Tools(engine, Settings(chunk_max_items=2), Registry({}), lambda _: ListedSource(AFTER, batch=7), wait)
        carry_out(claims[0], tools, lambda: None)
    else:
        bring_on(HeldBatch(claims[0], engine, Settings(), Registry({}), lambda: False))
    print(len(claims), flush=True)
"""


@contextmanager
def former_process(tree: Path, database_url: str) -> Iterator[Callable[[str], int]]:
    """Start a process of BEFORE_LEASED_WORK from that folder; yield what gives it a command and returns its answer."""
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
