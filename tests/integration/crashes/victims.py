"""The processes that die: an API, a dispatcher and a worker as they are in production, with their steps watched.

Each is a function that a forked process runs; what it needs comes as arguments, what it tells goes through a pipe.
"""

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final
from uuid import uuid4

import uvicorn
from kombu.transport.redis import Channel, QoS
from sqlalchemy import Engine

from api.app import ApiServer, create_app
from scheduler.dispatcher import Dispatcher
from scheduler.main import run as run_scheduler
from tests.forking import FORKS
from tests.integration.crashes.points import CrashPoints
from tests.obedient_engine import FussyEngine, encoding_chunks
from tests.protocol import SPEC
from tests.statements import watch
from vectormill.broker.app import make_app
from vectormill.broker.queues import QueueReader, RedisLossDetector
from vectormill.db.session import make_engine
from vectormill.settings import Settings
from worker.app import consume
from worker.identity import WorkerIdentity

PATIENCE_SECONDS: Final = 60.0
# A dead worker's chunks are back soon.
LEASE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Servers:
    database_url: str
    redis_url: str


def serve_api(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    engine = watched_engine(servers, points)
    app = create_app(Settings(chunk_max_items=1, open_loopback=True), engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        ApiServer(uvicorn.Config(app, log_config=None), app.state.stop_request).run(sockets=[listener])


def dispatch_once(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    points.surround(Channel, "_put", "PUBLISH")
    with (
        closing(RedisLossDetector(servers.redis_url)) as sentinel,
        closing(QueueReader(servers.redis_url)) as queues,
    ):
        app = make_app(servers.redis_url)
        dispatcher = Dispatcher(watched_engine(servers, points), app, sentinel, queues, ageing_seconds=60)
        dispatcher.recall_lost_messages()
        dispatcher.dispatch()


def work(servers: Servers, points: CrashPoints | None, pipe: Pipe) -> None:
    """A Celery worker on the model's queue; until SIGTERM, or its crash."""
    if points is None:
        database = make_engine(servers.database_url, application_name="worker")
    else:
        database = watched_engine(servers, points)
        points.surround(QoS, "ack", "ACK")
    heart = make_engine(servers.database_url, application_name="leases", pool_size=1)
    identity = WorkerIdentity(f"w-{uuid4().hex[:8]}@test", uuid4(), uuid4(), SPEC.model, slots=2)
    with encoding_chunks(
        database, FussyEngine(), heart=heart, identity=identity, lease_seconds=LEASE_SECONDS
    ) as encoder:
        consume(make_app(servers.redis_url), encoder, identity, slots=2)


def schedule(servers: Servers, points: None, pipe: Pipe) -> None:
    run_scheduler(
        Settings(
            database_url=servers.database_url,
            redis_url=servers.redis_url,
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=0.5,
            reap_seconds=0.3,
        )
    )


def watched_engine(servers: Servers, points: CrashPoints) -> Engine:
    """Its first connection is made here: what SQLAlchemy asks a server once is no step of ours."""
    engine = make_engine(servers.database_url, application_name="victim", pool_size=1)
    engine.connect().close()
    engine.dispose()
    watch(engine, points)
    return engine


Role = Callable[[Servers, Any, Pipe], None]


def _begin(role: Role, servers: Servers, last: int | None, is_watched: bool, pipe: Pipe) -> None:
    role(servers, CrashPoints(pipe, last) if is_watched else None, pipe)


class Child:
    """A process in some role, for as long as the block of `running`."""

    def __init__(
        self, role: Role, servers: Servers, *, last: int | None = None, is_watched: bool = True
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = FORKS.Process(target=_begin, args=(role, servers, last, is_watched, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing it tells. Raises EOFError when it has ended."""
        assert self._pipe.poll(PATIENCE_SECONDS), "the process told nothing"
        return self._pipe.recv()

    def hear_all(self, until: Callable[[str], bool] = lambda point: False) -> list[str]:
        """The points that it reaches, until it ends or `until` says that it was the last one."""
        points: list[str] = []
        try:
            while not (points and until(points[-1])):
                points.append(self.hear())
        except EOFError:
            self.process.join(PATIENCE_SECONDS)
        return points

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextmanager
def running(
    role: Role, servers: Servers, *, last: int | None = None, is_watched: bool = True
) -> Iterator[Child]:
    child = Child(role, servers, last=last, is_watched=is_watched)
    try:
        yield child
    finally:
        child.close()
