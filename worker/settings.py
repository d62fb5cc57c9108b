"""Settings of a worker: VECTORMILL_WORKER_… variables, read once and passed down."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vectormill.domain.errors import ConfigurationError
from vectormill.settings import WORKER_PREFIX, Settings, describe_validation_error, refuse_unknown_variables
from worker.devices.backends import BACKENDS
from worker.encoder.choice import PRECISIONS
from worker.encoder.encoder import AUTO
from worker.encoder.switches import describe_retired, parse_switches
from worker.placement.capacity import MEMORY_SHARE
from worker.placement.strategies import STRATEGIES

logger = logging.getLogger(__name__)


def one_of(*names: str) -> AfterValidator:
    """Return a validator that accepts only these values."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}; got {value!r}")
        return value

    return AfterValidator(check)


def check_switches(value: str) -> str:
    try:
        parse_switches(value)
    except ConfigurationError as error:
        raise ValueError(str(error).rstrip(".")) from error
    if retired := describe_retired(value):
        logger.warning("%s", retired)
    return value


class WorkerSettings(BaseSettings):
    """Settings of a worker. Each is documented in docs/CONFIGURATION.md."""

    model_config = SettingsConfigDict(env_prefix=WORKER_PREFIX, frozen=True, extra="ignore")

    devices: str = "auto"
    backend: Annotated[str, one_of(AUTO, *BACKENDS)] = AUTO
    precision: Annotated[str, one_of(AUTO, *PRECISIONS)] = AUTO
    attention: Literal["auto", "packed", "padded"] = "auto"
    switches: Annotated[str, AfterValidator(check_switches)] = AUTO
    strategy: Annotated[str, one_of(AUTO, *STRATEGIES)] = AUTO
    threads: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(default=None, ge=16)
    memory_high_watermark: float = Field(default=MEMORY_SHARE, gt=0, le=1)
    memory_low_watermark: float = Field(default=0.5, ge=0, le=1)
    reproducible: bool = False
    slots: int = Field(default=16, ge=1)
    interactive_slots: int = Field(default=2, ge=1)
    reuse_bytes: int = Field(default=64 << 20, ge=0)
    model_load_timeout_seconds: float = Field(default=600.0, gt=0)
    forward_timeout_seconds: float = Field(default=600.0, gt=0)
    proof_seconds: float = Field(default=300.0, gt=0)
    max_runner_restarts: int = Field(default=5, ge=0)

    @model_validator(mode="after")
    def _order_watermarks(self) -> Self:
        if self.memory_low_watermark > self.memory_high_watermark:
            raise ValueError(
                f"{WORKER_PREFIX}MEMORY_LOW_WATERMARK ({self.memory_low_watermark:g}) must not be above "
                f"{WORKER_PREFIX}MEMORY_HIGH_WATERMARK ({self.memory_high_watermark:g})"
            )
        return self


def load_worker_settings(**overrides: Any) -> WorkerSettings:
    """Return the settings of the environment, overridden by flags of the command line (None means not given).

    Raises ConfigurationError for an invalid value, and for a misspelt variable with the most similar valid
    name.
    """
    refuse_unknown_variables(os.environ, WORKER_PREFIX, WorkerSettings)
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return WorkerSettings(**given)
    except ValidationError as error:
        raise ConfigurationError(describe_validation_error(error, WORKER_PREFIX, given)) from error


def find_cache_dir(settings: Settings) -> Path:
    """Return the directory for converted models.

    It is the cache directory, or a directory in the data directory if the cache directory cannot be created.
    """
    wanted = settings.cache_dir.expanduser()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        other = settings.data_dir.expanduser() / "cache"
        logger.warning(
            "Cannot use the cache directory (%s); storing converted models in %s instead.", error, other
        )
        return other
    return wanted
