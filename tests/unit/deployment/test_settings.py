"""Settings that must hold together are refused when they do not."""

import pytest

from vectormill.domain.errors import ConfigurationError
from vectormill.settings import load_settings


def test_a_heartbeat_that_one_loss_would_make_too_late_is_refused() -> None:
    cases: tuple[tuple[float, float], ...] = (
        (5, 10),  # a single lost heartbeat would end every lease
        (6, 60),  # and make a worker look dead to the dispatcher
        (30, 30),
    )
    for heartbeat, lease in cases:
        with pytest.raises(ConfigurationError, match=r"^VECTORMILL_HEARTBEAT_SECONDS .* must be at most"):
            load_settings(heartbeat_seconds=heartbeat, lease_seconds=lease)


def test_an_address_of_redis_that_nobody_can_read_is_refused_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases: tuple[str, ...] = (
        "redis://:moon/shine@queue:6379/0",
        "redis://:moonshine@queue:moon/0",
        "moonshine",
    )
    for url in cases:
        monkeypatch.setenv("VECTORMILL_REDIS_URL", url)
        with pytest.raises(ConfigurationError, match="not a Redis URL") as refused:
            load_settings()
        assert "moon" not in str(refused.value)
