"""Keeps the time: what is due by the database's clock becomes a run, each due time once. Needs no Redis."""

import logging

from sqlalchemy import Engine

from vectormill.schedules.schedules import fire_schedule, list_due_schedules

logger = logging.getLogger(__name__)


def fire_due_schedules(engine: Engine) -> int:
    """Return the number of due times that were dealt with. Each is a transaction: one that fails stops no other.

    Raise SQLAlchemyError when Postgres is away.
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
