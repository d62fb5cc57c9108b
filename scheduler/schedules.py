"""Turn due times of schedules, by the database's clock, into runs, each exactly once. Redis is not needed."""

import logging

from sqlalchemy import Engine

from vectormill.schedules.schedules import fire_schedule, list_due_schedules

logger = logging.getLogger(__name__)


def fire_due_schedules(engine: Engine) -> int:
    """Fire the schedules that are due, each as a run. Return the number of due times handled.

    Each due time has a transaction of its own, so that one that fails does not stop the others. Raise
    SQLAlchemyError if Postgres is away.
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
