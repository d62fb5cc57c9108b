"""Workers are told to end under load, or have a wrong clock; nothing is lost or blamed."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.acceptance import tiny
from tests.acceptance.parts import NUM_WORKERS, Parts
from tests.acceptance.producer import Promise, assert_kept, load, promise
from tests.architecture.sources import ROOT
from tests.sick_encoders import FAULT
from tests.waiting import wait_for
from worker.placement.placement import read_assignment

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

# Every session says who it is; a chunk's row tells no more who ended it.
LOG_ENDS = """
    CREATE TABLE IF NOT EXISTS public.ends (chunk_id bigint, fence bigint, session text);
    CREATE OR REPLACE FUNCTION public.log_end() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.ends VALUES (NEW.id, NEW.fence, current_setting('application_name'));
        RETURN NULL;
    END $$;
    CREATE OR REPLACE TRIGGER log_end AFTER UPDATE ON vectormill.chunks
       FOR EACH ROW WHEN (NEW.state = 'done' AND OLD.state <> 'done') EXECUTE FUNCTION public.log_end();
"""
FORGET_ENDS = "DROP TRIGGER log_end ON vectormill.chunks; DROP TABLE public.ends"


def ended_by(parts: Parts, kept: Promise) -> set[str]:
    """Return the sessions that ended chunks of the job."""
    rows = parts.sql(
        "SELECT session FROM public.ends JOIN vectormill.chunks ON chunks.id = chunk_id"
        f" WHERE job_id = '{kept.job_id}'"
    )
    return {str(session) for (session,) in rows}


def holders(parts: Parts) -> dict[str, int]:
    """How many chunks each worker holds, by its name."""
    rows = parts.sql(
        "SELECT split_part(lease_owner, '#', 1), count(*) FROM vectormill.chunks WHERE state = 'leased' GROUP BY 1"
    )
    return {str(name): int(str(count)) for name, count in rows}


def worker_on(parts: Parts, device: str) -> psutil.Process:
    """The worker process of one device."""

    def name_of(process: psutil.Process) -> str:
        arguments = process.cmdline()
        return read_assignment(arguments[arguments.index("--assignment") + 1]).devices[0].name

    (worker,) = [each for each in parts.workers() if name_of(each) == device]
    return worker


def test_workers_told_to_end_one_after_the_other_under_load_cost_no_attempt(parts: Parts) -> None:
    with load(parts, seed=51, num_producers=2, job_items=600) as ledger:
        for device in ("cpu:0", "cpu:1", "cpu:0", "cpu:1"):
            wait_for(lambda: any(holders(parts).values()), 60, "workers hold chunks")
            worker = worker_on(parts, device)
            worker.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs([worker], timeout=90)
            assert not alive, "it did not end"
            wait_for(lambda: len(parts.runners()) == NUM_WORKERS and parts.is_ready(), 120, "it is back")
    assert_kept(parts, *ledger.promises)
    assert ledger.surprises == []
    ids = ", ".join(f"'{each.job_id}'" for each in ledger.promises)
    assert ledger.promises
    assert (
        list(
            parts.sql(
                f"SELECT id, attempt, lost, error FROM vectormill.chunks WHERE job_id IN ({ids}) AND attempt <> 1"
            )
        )
        == []
    )
    assert parts.sql(f"SELECT id FROM vectormill.jobs WHERE id IN ({ids}) AND num_retried_chunks > 0") == []


WRONG_CLOCK = """
import datetime, os, pathlib, time

_skew = float(os.environ["TEST_CLOCK_SKEW"])
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


class SkewedDatetime(_datetime):
    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_skew)

    @classmethod
    def utcnow(cls):
        return _datetime.utcnow() + datetime.timedelta(seconds=_skew)


time.time = lambda: _time() + _skew
time.time_ns = lambda: _time_ns() + int(_skew * 1e9)
datetime.datetime = SkewedDatetime
pathlib.Path(os.environ["TEST_CLOCK_PROOF"]).touch()
"""


def test_workers_whose_clocks_are_an_hour_off_change_nothing(
    parts: Parts, collection: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    parts.sql(LOG_ENDS)
    parts.end_part("launcher")
    try:
        for name, skew in (("ahead", 3600), ("behind", -3600)):
            proof = tmp_path / name
            environment = {
                "PYTHONPATH": f"{tmp_path}:{ROOT}",
                "TEST_CLOCK_SKEW": str(skew),
                "TEST_CLOCK_PROOF": str(proof),
                "VECTORMILL_WORKER_DEVICES": "cpu",
            }
            parts.start(name, "worker", "--model", tiny.MODEL, environment=environment)
        parts.wait_until_ready()
        assert (tmp_path / "ahead").exists()
        assert (tmp_path / "behind").exists()
        names = {str(name) for (name,) in parts.sql("SELECT name FROM vectormill.workers")}
        kept: list[Promise] = []

        def both_have_worked() -> bool:
            kept.append(promise(parts, list(range(600)), collection))
            assert_kept(parts, *kept)
            return {session for each in kept for session in ended_by(parts, each)} >= names

        wait_for(both_have_worked, 120, "both workers have done chunks")
        ids = ", ".join(f"'{each.job_id}'" for each in kept)
        assert list(
            parts.sql(f"SELECT sum(num_retried_chunks) FROM vectormill.jobs WHERE id IN ({ids})")
        ) == [(0,)]
    finally:
        for name in ("ahead", "behind"):
            parts.end_part(name)
        parts.sql(FORGET_ENDS)
        parts.start("launcher", "worker", "--model", tiny.MODEL)
        parts.wait_until_ready()


FLIPS_A_BIT = """
from worker.engine.engine import Engine

Engine.__init__.__kwdefaults__["factory"] = "tests.integration.engine.test_proofs:load_flipping"
"""


def test_a_worker_whose_proof_turns_bad_ends_and_its_launcher_starts_another(
    parts: Parts, collection: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FLIPS_A_BIT)
    environment = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "VECTORMILL_WORKER_DEVICES": "cpu:0",
        "VECTORMILL_WORKER_PROOF_SECONDS": "3",
    }

    def count(condition: str, job: Promise | None = None) -> int:
        """Count the periods of workers, only those in which chunks of the job were computed if it is given."""
        if job:
            condition += f" AND id IN (SELECT proof_id FROM vectormill.chunks WHERE job_id = '{job.job_id}')"
        (row,) = parts.sql(f"SELECT count(*) FROM vectormill.proofs WHERE {condition}")
        return int(str(row[0]))

    parts.end_part("launcher")
    try:
        parts.start("launcher", "worker", "--model", tiny.MODEL, environment=environment)
        before = promise(parts, list(range(300)))
        assert_kept(parts, before)
        wait_for(lambda: not count("proven_at IS NULL", before), 60, "what was computed is proven")
        (worker,) = parts.workers()
        (parts.directory / "cache" / FAULT).touch()
        faulty = promise(parts, list(range(300, 600)), collection)
        wait_for(lambda: count("failed_at IS NOT NULL"), 60, "the flipped bit is found")
        _, alive = psutil.wait_procs([worker], timeout=90)
        assert not alive, "the faulty worker goes on"
        unrepaired = "failed_at IS NOT NULL AND repaired_at IS NULL"
        wait_for(lambda: not count(unrepaired), 60, "its chunks are put back")
        assert_kept(parts, before, faulty)
        (successor,) = parts.workers()
        assert successor.pid != worker.pid
        assert not count("failed_at IS NOT NULL", faulty), "a faulty result has stayed"
    finally:
        parts.end_part("launcher")
        parts.start("launcher", "worker", "--model", tiny.MODEL)
        parts.wait_until_ready()
