"""Create a run for each schedule that is due by the database's clock. Redis is not needed."""

import logging

from sqlalchemy import Engine

from vectormill.schedules.schedules import fire_schedule, list_due_schedules

logger = logging.getLogger(__name__)


def fire_due_schedules(engine: Engine) -> int:
    """Fire the schedules that are due, each at most once. Return the number of schedules fired.

    Each has a transaction of its own, so an error does not undo the runs of earlier ones. Raise
    SQLAlchemyError if Postgres is away; the next round fires the rest.
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
