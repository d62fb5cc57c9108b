"""Servers: what Postgres, Redis and the API say of themselves, as findings. Changes nothing on them."""

from collections.abc import Iterator
from typing import Final

import httpx
import redis
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.cli.doctor.checks import FAIL, OK, WARN, Finding
from vectormill.client import is_loopback
from vectormill.db.migrations import find_missing_revision
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError
from vectormill.embedded.postgres import MIN_PGVECTOR

TESTED_POSTGRES: Final = 160000
# 0.7 brought halfvec, without which no collection can be made.
OLDEST_PGVECTOR: Final = (0, 7)
TIMEOUT_SECONDS: Final = 5.0


def ask_postgres(url: str) -> Iterator[Finding]:
    """Reachable, new enough, with pgvector, and at the newest migration."""
    engine = make_engine(url, application_name="vectormill doctor", pool_size=1)
    try:
        with engine.connect() as connection:
            number = int(connection.execute(text("SHOW server_version_num")).scalar_one())
            yield judge_postgres(number, connection.execute(text("SHOW server_version")).scalar_one())
            pgvector = connection.execute(FIND_PGVECTOR).one_or_none()
            yield judge_pgvector(*(pgvector or (None, None)))
        missing = find_missing_revision(engine)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        host = engine.url.render_as_string(hide_password=True)
        yield Finding("postgres", FAIL, f"{host}: {cause}", "Start it, or correct VECTORMILL_DATABASE_URL.")
        return
    except ConfigurationError as error:
        yield Finding("migrations", FAIL, "the database is of another line of releases", str(error))
        return
    finally:
        engine.dispose()
    if missing is None:
        yield Finding("migrations", OK, "the schema is current")
    else:
        yield Finding("migrations", FAIL, f"revision {missing} is missing", "Run `vectormill migrate`.")


FIND_PGVECTOR: Final = text(
    "SELECT installed_version, default_version FROM pg_available_extensions WHERE name = 'vector'"
)


def judge_postgres(number: int, name: str) -> Finding:
    """`number` is server_version_num, `name` what people call it."""
    if number < TESTED_POSTGRES:
        return Finding(
            "postgres", WARN, f"version {name}", "Use Postgres 16 or newer; older ones are not tested."
        )
    return Finding("postgres", OK, f"version {name}")


def judge_pgvector(installed: str | None, available: str | None) -> Finding:
    """Return the versions in the database and on the server; None where there is none."""
    found = installed or available
    if found is None:
        advice = "Install pgvector 0.8.4 or newer on the server."
        return Finding("pgvector", FAIL, "not installed on the server", advice)
    version = tuple(int(part) for part in found.split("."))
    if version < MIN_PGVECTOR:
        is_usable = version[:2] >= OLDEST_PGVECTOR
        reason = "This one can damage an HNSW index in vacuum." if is_usable else "This one has no halfvec."
        advice = f"{reason} Install pgvector 0.8.4 or newer and run ALTER EXTENSION vector UPDATE."
        return Finding("pgvector", WARN if is_usable else FAIL, f"version {found}", advice)
    if installed is None:
        return Finding("pgvector", OK, f"version {found} is there; `vectormill migrate` enables it")
    return Finding("pgvector", OK, f"version {found}")


def ask_redis(url: str) -> Iterator[Finding]:
    """Reachable, and never evicting keys: an evicted queue is lost work for as long as a reaper's round."""
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=TIMEOUT_SECONDS, socket_timeout=TIMEOUT_SECONDS
        ) as connection:
            server = connection.info("server")
            policy = connection.info("memory").get("maxmemory_policy", "unknown")
    except (redis.RedisError, OSError, ValueError) as error:
        yield Finding("redis", FAIL, f"{error}", "Start it, or correct VECTORMILL_REDIS_URL.")
        return
    name = "Valkey" if "valkey_version" in server else "Redis"
    detail = f"{name} {server.get('valkey_version', server.get('redis_version'))}, maxmemory-policy {policy}"
    if policy == "noeviction":
        yield Finding("redis", OK, detail)
    else:
        yield Finding("redis", WARN, detail, "Set maxmemory-policy noeviction, or messages may be dropped.")


def ask_api(url: str, api_key: str | None) -> Iterator[Finding]:
    """Ready, with whom, and whether it lets us in."""
    try:
        with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=not is_loopback(url)) as client:
            answer = client.get(f"{url}/readyz")
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            listed = client.get(f"{url}/v1/workers", headers=headers)
        readiness = answer.json()
        workers = listed.json().get("data", [])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        yield Finding("service", FAIL, f"{url}: {error}", "Start it with `vectormill up`.")
        return
    detail = f"{url} is {readiness.get('status')}, {readiness.get('workers', 0)} workers"
    if not answer.is_success:
        yield Finding("service", FAIL, detail, "Its Postgres is away; see the API's log.")
    elif not readiness.get("redis") or not readiness.get("scheduler") or not readiness.get("workers"):
        absent = [name for name in ("redis", "scheduler", "workers") if not readiness.get(name)]
        yield Finding(
            "service", WARN, f"{detail}; away: {', '.join(absent)}", "Jobs are taken, but they wait."
        )
    elif listed.status_code == httpx.codes.UNAUTHORIZED:
        advice = "Set VECTORMILL_API_KEY to a key of it; `vectormill keys create NAME` prints a new one."
        yield Finding("service", WARN, f"{detail}; it wants an API key that it knows", advice)
    else:
        yield Finding("service", OK, detail)
    for worker in workers:
        if not worker["slots"]:  # its model is not loaded
            reason = worker["report"].get("state_reason") or "it gives no reason"
            advice = (
                "Its jobs wait, and it tries again: mend that, or start a worker for the model elsewhere."
            )
            yield Finding(
                f"worker {worker['name']}", FAIL, f"cannot load {worker['model']}: {reason}", advice
            )
