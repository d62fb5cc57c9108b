"""Settings of all processes: VECTORMILL_… environment variables, read once and passed down."""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from vectormill.domain.errors import ConfigurationError
from vectormill.models.model_entry import ModelEntry as ModelEntry

PREFIX = "VECTORMILL_"
Server = Literal["database_url", "redis_url", "owner_database_url", "reader_database_url"]
# A process without a heartbeat for this long counts as dead. It is a constant, because the processes that
# send heartbeats and those that check them have to agree.
ALIVE_SECONDS: Final = 15.0
# One lost and one late heartbeat must neither make a worker look dead nor let its leases expire.
BEATS_IN_A_LEASE: Final = 3


def check_redis_url(url: str | None) -> str | None:
    """Raise ValueError if the URL is not a valid Redis URL.

    The message does not quote the URL, since an invalid port is often part of a password.
    """
    try:
        is_read = url is None or (
            urlsplit(url).scheme in ("redis", "rediss", "unix") and urlsplit(url).port != 0
        )
    except ValueError:
        is_read = False
    if not is_read:
        raise ValueError(
            "not a Redis URL; expected redis://:PASSWORD@HOST:6379/0, with / in the password as %2F and # as %23"
        )
    return url


def split_folders(written: object) -> object:
    """Return the folders of a setting, which are written as in PATH."""
    if isinstance(written, str):
        return [part for part in written.split(os.pathsep) if part]
    return [written] if isinstance(written, Path) else written


Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_folders)]


class Settings(BaseSettings):
    """Settings shared by all processes. Each is documented in docs/CONFIGURATION.md."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=None, frozen=True, extra="ignore"
    )

    database_url: str | None = None
    owner_database_url: str | None = None
    reader_database_url: str | None = None
    redis_url: Annotated[str | None, AfterValidator(check_redis_url)] = None
    data_dir: Path = Path("~/.vectormill")
    cache_dir: Path = Path("~/.cache/vectormill")
    models: dict[str, ModelEntry] = Field(default_factory=dict)

    api_host: str = "127.0.0.1"
    api_port: int = Field(default=8000, ge=0, le=65535)
    api_url: str | None = None
    api_key: str | None = None
    allowed_hosts: str = ""
    trusted_proxies: str = ""
    hsts_seconds: int = Field(default=0, ge=0)
    open_metrics: bool = False
    open_loopback: bool = False
    flower_host: str = "127.0.0.1"
    flower_port: int = Field(default=5555, ge=0, le=65535)
    flower_basic_auth: str | None = None
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(str.upper)
    ] = "INFO"
    otlp_endpoint: str | None = None
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    log_format: Literal["text", "json"] = "text"

    chunk_max_items: int = Field(default=2048, ge=1, le=65536)
    chunk_max_bytes: int = Field(default=1 << 20, ge=1024)
    max_text_chars: int = Field(default=1_000_000, ge=1)
    max_key_bytes: int = Field(default=1024, ge=1, le=2048)
    max_json_bytes: int = Field(default=64 << 20, ge=1024)
    max_line_bytes: int = Field(default=16 << 20, ge=1024)
    source_root: Folders = ()
    unguarded_sources: str = ""
    output_root: Folders = ()
    output_prefixes: str = ""
    output_grace_seconds: float = Field(default=900.0, gt=0)
    search_timeout_seconds: float = Field(default=30.0, gt=0)
    put_wait_seconds: float = Field(default=5.0, ge=0)

    max_connections: int = Field(default=512, ge=1)
    max_requests: int = Field(default=256, ge=1)
    max_requests_per_key: int = Field(default=192, ge=1)
    max_logins: int = Field(default=16, ge=1)
    max_uploads: int = Field(default=64, ge=1)
    max_quotes: int = Field(default=4, ge=1)
    max_searches: int = Field(default=64, ge=1)
    max_search_queries: int = Field(default=100, ge=1)
    max_watchers: int = Field(default=100, ge=1)
    max_waiting_puts: int = Field(default=128, ge=1)
    max_deleted_keys: int = Field(default=10_000, ge=1)
    max_json_bytes_at_once: int = Field(default=64 << 20, ge=1024)
    body_idle_seconds: float = Field(default=60.0, gt=0)
    max_job_items: int = Field(default=50_000_000, ge=1)
    max_job_bytes: int = Field(default=100 << 30, ge=1024)
    max_gzip_ratio: int = Field(default=200, ge=1)
    max_file_bytes: int = Field(default=32 << 30, ge=1024)
    max_pending_items: int = Field(default=200_000_000, ge=1)
    max_collections: int = Field(default=10_000, ge=1)

    index_rows: int = Field(default=10_000, ge=0)
    index_memory_share: float = Field(default=0.25, gt=0, le=1)
    index_rebuild_share: float = Field(default=0.2, gt=0)
    index_bulk_share: float = Field(default=0.3, gt=0)
    tend_seconds: float = Field(default=30.0, gt=0)

    lease_seconds: float = Field(default=30.0, gt=0)
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    max_attempts: int = Field(default=5, ge=1)
    indexer_runs: int = Field(default=4, ge=1, le=64)
    dispatch_seconds: float = Field(default=0.1, gt=0)
    idle_dispatch_seconds: float = Field(default=2.0, gt=0)
    reap_seconds: float = Field(default=5.0, gt=0)
    queued_timeout_seconds: float = Field(default=60.0, gt=0)
    ageing_seconds: float = Field(default=600.0, gt=0)
    load_failure_seconds: float = Field(default=86400.0, gt=0)
    upload_timeout_seconds: float = Field(default=3600.0, gt=0)
    retention_days: float = Field(default=30.0, gt=0)
    file_retention_days: float = Field(default=30.0, gt=0)
    webhook_timeout_seconds: float = Field(default=15.0, gt=0, le=300)
    webhook_private_targets: bool = False
    retired_generation_days: float = Field(default=7.0, ge=0)

    def need(self, name: Server) -> str:
        """Return the URL of a server that a process cannot do without. Raise ConfigurationError without one."""
        url: str | None = getattr(self, name)
        if url is None:
            raise ConfigurationError(
                f"{PREFIX}{name.upper()} is not set, and no stack is running on {self.data_dir}: start one with "
                f"`vectormill up --data-dir {self.data_dir}`, name the directory of another by --data-dir, or set the "
                "variable to your own server."
            )
        return url

    def list_unguarded_sources(self) -> frozenset[str]:
        """Return the names of database drivers and protocols that the operator allows to sources."""
        return frozenset(self.unguarded_sources.replace(",", " ").split())

    @property
    def reader_url(self) -> str | None:
        """Return the URL for queries of sources on the own database, by default that of the service."""
        return self.reader_database_url or self.database_url

    @property
    def owner_url(self) -> str:
        """Return the URL for migrations and backups, by default that of the service. Raise ConfigurationError."""
        return self.owner_database_url or self.need("database_url")

    @model_validator(mode="after")
    def _order_times(self) -> Self:
        longest = min(ALIVE_SECONDS, self.lease_seconds) / BEATS_IN_A_LEASE
        if self.heartbeat_seconds > longest:
            raise ValueError(
                f"{PREFIX}HEARTBEAT_SECONDS ({self.heartbeat_seconds:g}) must be at most {longest:g}: "
                f"{BEATS_IN_A_LEASE} heartbeats must fit in {PREFIX}LEASE_SECONDS ({self.lease_seconds:g}) and in the "
                f"{ALIVE_SECONDS:g} s after which a silent worker counts as dead"
            )
        return self


def describe_data_dir(data_dir: Path | None) -> str:
    """Return the option of a command that names this data directory; empty for the default one."""
    default: Path = Settings.model_fields["data_dir"].default.expanduser()
    is_default = data_dir is None or data_dir in (default, Path(os.path.realpath(default)))
    return "" if is_default else f" --data-dir {shlex.quote(str(data_dir))}"


API_KEY_VARIABLE = PREFIX + "API_KEY"
# What pydantic writes before the message of a validator of ours.
VALUE_ERROR: Final = "Value error, "

# Variables with secrets of Vectormill; FLOWER_BASIC_AUTH is Flower's own name for its password.
SECRET_VARIABLES = frozenset(
    {f"{PREFIX}{name}" for name in ("FLOWER_BASIC_AUTH", *map(str.upper, get_args(Server)))}
    | {API_KEY_VARIABLE, "FLOWER_BASIC_AUTH"}
)

# Secrets of other programs have a telling word in their name (PGPASSWORD, HF_TOKEN, AWS_ACCESS_KEY_ID, and
# the headers of requests to a trace collector), or a password in their value.
SECRET_NAME: Final = re.compile(
    r"(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|KEY|CREDENTIAL|AUTH|HEADER)S?(?:_|$)", re.IGNORECASE
)
SECRET_VALUE: Final = re.compile(r"://[^:/?#\s]*:[^@\s]*@|\bpassword\s*=", re.IGNORECASE)

# The prefix of variables that another settings class reads, for instance worker.settings.
WORKER_PREFIX = PREFIX + "WORKER_"


def load_settings(**overrides: Any) -> Settings:
    """Return the settings of the environment, overridden by arguments that are not None.

    Raise ConfigurationError for an invalid value, and for a misspelt variable with the nearest correct name.
    """
    refuse_unknown_variables(os.environ, PREFIX, Settings, ignored_prefix=WORKER_PREFIX)
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(describe_validation_error(error, PREFIX)) from error


def refuse_unknown_variables(
    environment: Mapping[str, str], prefix: str, settings: type[BaseSettings], ignored_prefix: str = "-"
) -> None:
    """Raise ConfigurationError if a variable with the prefix belongs to no setting."""
    known = [prefix + name.upper() for name in settings.model_fields]
    for variable in environment:
        if variable.startswith(prefix) and not variable.startswith(ignored_prefix) and variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0)
            raise ConfigurationError(f"{variable} is not a setting of Vectormill; did you mean {nearest[0]}?")


def describe_validation_error(error: ValidationError, prefix: str, flags: Collection[str] = ()) -> str:
    """Return one sentence per wrong setting, each naming the variable, or the flag that gave it.

    A sentence on several settings names them itself.
    """
    sentences = []
    for entry in error.errors():
        name = ".".join(map(str, entry["loc"]))
        source = f"--{name}: " if name in flags else f"{prefix}{name.upper()}: " if name else ""
        sentences.append(f"{source}{entry['msg'].removeprefix(VALUE_ERROR)}.")
    return " ".join(sentences)


def process_environment(shared: Settings | None = None) -> dict[str, str]:
    """Return a copy of this process's environment, as a base for that of a child.

    With `shared`, the child uses the data directory and the servers of these settings, wherever they were found.
    """
    names = ("data_dir", "database_url", "redis_url") if shared is not None else ()
    found = {name: value for name in names if (value := getattr(shared, name)) is not None}
    return dict(os.environ) | {f"{PREFIX}{name.upper()}": str(value) for name, value in found.items()}


def read_api_key() -> str | None:
    """Return the API key in the environment, for a client that was given none. Read no other variable."""
    return os.environ.get(API_KEY_VARIABLE, "").strip() or None


def read_api_url() -> str | None:
    """Return the API's address in the environment, for a client that was given none. Read no other variable."""
    return os.environ.get(f"{PREFIX}API_URL", "").strip() or None


def read_variable(name: str) -> str:
    """Return the value of the environment variable that a command's option names. Raise ConfigurationError."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(f"The environment variable {name} is not set.")
    return value


def read_data_dir() -> Path:
    """Return the data directory in the environment, or the default one. Read no other variable."""
    directory = os.environ.get(f"{PREFIX}DATA_DIR", "").strip() or Settings.model_fields["data_dir"].default
    return Path(directory).expanduser()


def find_collector(settings: Settings) -> str | None:
    """Return the URL of the trace collector: our setting, or else OpenTelemetry's common variable."""
    return settings.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or None


def drop_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without secrets, for a process that calls no service.

    Secrets are recognised by the variable's name and by a password in its value.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in SECRET_VARIABLES and not SECRET_NAME.search(name) and not SECRET_VALUE.search(value)
    }
