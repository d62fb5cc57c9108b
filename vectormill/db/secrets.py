"""The secrets that the processes of an installation share; only they read this table."""

import time

from sqlalchemy import Engine, text

LOAD_SECRET = text("""
    SELECT value, extract(epoch FROM required_from - now())::float8 AS seconds
      FROM vectormill.secrets WHERE name = :name
""")


def load_secret(engine: Engine, name: str) -> tuple[bytes, float]:
    """Return a secret, and the time on the monotonic clock from which it is required. Raise SQLAlchemyError."""
    with engine.connect() as connection:
        row = connection.execute(LOAD_SECRET, {"name": name}).one()
    return bytes(row.value), time.monotonic() + row.seconds
