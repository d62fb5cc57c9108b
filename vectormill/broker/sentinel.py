"""Notices that Redis lost its content: a flush, a restart, another server behind the same name."""

import secrets

from redis import Redis

SENTINEL_KEY = "vectormill:sentinel"


class Sentinel:
    """Keeps a random key in Redis and remembers the server's run_id; when either is not as left, content was lost."""

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=2, socket_connect_timeout=2)
        self._value: bytes | str | None = None
        self._run_id: str | None = None

    def has_lost_content(self) -> bool:
        """True once after every loss, and at the first look unless an earlier scheduler's key is still there.

        Raises redis.exceptions.RedisError while Redis is away.
        """
        value: bytes | str | None = self._redis.get(SENTINEL_KEY)
        run_id = self._redis.info("server")["run_id"]
        is_first = self._value is None
        is_lost = value is None or (not is_first and (value != self._value or run_id != self._run_id))
        if value is None:
            value = secrets.token_hex(8).encode()
            self._redis.set(SENTINEL_KEY, value)
        self._value, self._run_id = value, run_id
        return is_lost

    def close(self) -> None:
        self._redis.close()
