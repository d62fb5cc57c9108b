"""The scheduler process: elected by an advisory lock, it runs every duty at its own interval.

Any number of schedulers may run. One works and the others wait for the lock, which Postgres releases as soon
as the holder's session ends. While Postgres is away, the scheduler keeps trying.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from scheduler.dispatcher import Dispatcher
from scheduler.index_maintainer import IndexMaintainer
from scheduler.pruner import Pruner
from scheduler.reaper import Reaper, Recomputer
from scheduler.webhooks import WebhookSender
from vectormill.broker.app import make_app
from vectormill.broker.doorbell import WakeUpSubscriber
from vectormill.broker.queues import QueueReader, RedisLossDetector
from vectormill.db.locks import win_election
from vectormill.db.session import driver_of, make_engine
from vectormill.jobs.backlog import add_up_counts
from vectormill.jobs.dispatch import has_heard_of_job, has_open_jobs, listen_for_jobs
from vectormill.jobs.transitions import add_up_jobs
from vectormill.processes.stopping import StopSignals
from vectormill.schedules.schedules import fire_schedule, list_due_schedules
from vectormill.settings import Settings
from vectormill.workers.workers import beat_scheduler

logger = logging.getLogger(__name__)

# The connections of the election and of the duties; pruning and webhooks have one each (docs/POSTGRES.md,
# "Connections").
POOL_SIZE = 2
_BEAT_SECONDS = 5.0
# The time to collect further wake-ups, so that workers which wake the dispatcher together, or one that does
# so at every small chunk, cost one round.
_RINGING_SECONDS = 0.01
# A round that took long is followed by a rest of so many times its duration, at most a second, whoever wakes the
# dispatcher: it reads the chunks in flight, and with thousands of them it must not take Postgres for itself.
_REST = 3.0
_LONG_ROUND_SECONDS = 0.01
_MOST_REST_SECONDS = 1.0
_SENTINEL_SECONDS = 1.0
_SCHEDULE_SECONDS = 1.0
_COUNT_SECONDS = 5.0
_ADD_UP_SECONDS = 0.2
_RECOMPUTE_SECONDS = 1.0


class Duty:
    """A duty that is carried out at a fixed interval."""

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self._seconds = seconds
        self._act = act
        self._next = 0.0

    def run_if_due(self, now: float) -> None:
        if now >= self._next:
            self._next = now + self._seconds
            self._act()


def run(settings: Settings) -> None:
    """Run the scheduler until SIGTERM or SIGINT."""
    with StopSignals() as stop:
        _serve(settings, settings.need("database_url"), settings.need("redis_url"), stop)


def _serve(settings: Settings, database_url: str, redis_url: str, stop: threading.Event) -> None:
    engine = make_engine(
        database_url, application_name="vectormill scheduler", pool_size=POOL_SIZE, max_overflow=0
    )
    sentinel = RedisLossDetector(redis_url)
    queues = QueueReader(redis_url)
    pruning = make_engine(database_url, application_name="vectormill pruner", pool_size=1, max_overflow=0)
    posting = make_engine(database_url, application_name="vectormill webhooks", pool_size=1, max_overflow=0)
    subscriber = WakeUpSubscriber(redis_url)
    dispatcher = Dispatcher(engine, make_app(redis_url), sentinel, queues, settings.ageing_seconds)

    @contextmanager
    def duties_beside() -> Iterator[None]:
        pruner = Pruner(
            pruning,
            settings.retention_days * 86400,
            settings.upload_timeout_seconds,
            settings.retired_generation_days * 86400,
            settings.load_failure_seconds,
        )
        with pruner, WebhookSender(posting, settings):
            yield

    while not stop.is_set():
        try:
            _serve_term(engine, dispatcher, subscriber, duties_beside, settings, stop)
        except (SQLAlchemyError, psycopg.Error) as error:
            logger.warning("Cannot reach Postgres; retrying: %s", error)
            stop.wait(1.0)
    sentinel.close()
    queues.close()
    subscriber.close()
    engine.dispose()
    pruning.dispose()
    posting.dispose()


def _serve_term(
    engine: Engine,
    dispatcher: Dispatcher,
    subscriber: WakeUpSubscriber,
    duties_beside: Callable[[], AbstractContextManager[None]],
    settings: Settings,
    stop: threading.Event,
) -> None:
    """Wait for the election, then work until the lock's session breaks or the process has to stop."""
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ExitStack() as cleanup,
    ):
        # The lock belongs to the session, so the session must end with the term: returned to the pool after
        # an error, it would keep the lock from every scheduler, including this one.
        cleanup.callback(connection.invalidate)
        driver = driver_of(connection)
        while not win_election(driver):
            if stop.wait(1.0):
                return
        logger.info("Elected; dispatching.")
        dispatcher.begin_term()
        listen_for_jobs(driver)
        duties = [
            Duty(_SENTINEL_SECONDS, dispatcher.recall_lost_messages),
            Duty(_BEAT_SECONDS, lambda: _beat(engine, dispatcher)),
            Duty(settings.reap_seconds, Reaper(engine, settings).reap),
            Duty(_RECOMPUTE_SECONDS, Recomputer(engine).recompute),
            Duty(settings.tend_seconds, IndexMaintainer(engine, settings).tend),
            Duty(_ADD_UP_SECONDS, lambda: add_up_jobs(engine)),
            Duty(_SCHEDULE_SECONDS, lambda: fire_due_schedules(engine)),
            Duty(_COUNT_SECONDS, lambda: add_up_counts(engine)),
        ]
        with duties_beside():
            while not stop.is_set():
                now = time.monotonic()
                for duty in duties:
                    duty.run_if_due(now)
                began = time.monotonic()
                dispatcher.dispatch()
                rest = plan_rest(time.monotonic() - began)
                # A submission or a worker that runs low ends the pause early. Otherwise it is short while
                # jobs are open, and long while none is.
                seconds = (
                    settings.dispatch_seconds if has_open_jobs(driver) else settings.idle_dispatch_seconds
                )
                pause(driver, subscriber, seconds, stop, rest)


def plan_rest(round_seconds: float) -> float:
    """Return the seconds for which nothing wakes the dispatcher after a round of this duration."""
    return min(_REST * round_seconds, _MOST_REST_SECONDS) if round_seconds > _LONG_ROUND_SECONDS else 0.0


def pause(
    driver: psycopg.Connection[Any],
    subscriber: WakeUpSubscriber,
    seconds: float,
    stop: threading.Event,
    rest_seconds: float = 0.0,
) -> None:
    """Rest, then wait until a job arrives, a worker wakes the dispatcher, or the time is over.

    What has happened during the rest ends the wait at once.
    """
    subscriber.listen()
    if rest_seconds:
        stop.wait(rest_seconds)
    if has_heard_of_job(driver):
        return
    has_rung = subscriber.wait(seconds, driver)
    has_heard_of_job(driver)  # a notification that ended this pause must not end the next one too
    if has_rung:
        stop.wait(_RINGING_SECONDS)


def _beat(engine: Engine, dispatcher: Dispatcher) -> None:
    with engine.begin() as connection:
        beat_scheduler(
            connection, is_redis_away=dispatcher.is_redis_away, is_redis_full=dispatcher.is_redis_full
        )


def fire_due_schedules(engine: Engine) -> int:
    """Create a run for each schedule that is due by the database's clock, at most once. Return the number of runs.

    Each has a transaction of its own, so an error does not undo the runs of earlier ones. Raise
    SQLAlchemyError if Postgres is away; the next round fires the rest.
    """
    with engine.connect() as connection:
        due = list_due_schedules(connection)
    num_fired = 0
    for schedule_id in due:
        with engine.begin() as connection:
            firing = fire_schedule(connection, schedule_id)
        if firing is None:
            continue
        num_fired += 1
        logger.info(
            "Schedule %s, due at %s: run %s is %s. %s",
            firing.schedule,
            firing.due_at.isoformat(),
            firing.run_id,
            firing.state,
            firing.reason or "",
        )
    return num_fired
