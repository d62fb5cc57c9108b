"""Tell which models have been used, so that an upgrade that reads them more strictly refuses none of these."""

from typing import Final

from sqlalchemy import Engine, text

# Jobs are pruned after a while, and generations last as long as their collection. Both tables are small beside items,
# and a process asks once for each model whose files have a flaw.
IS_IN_USE: Final = text(
    """
    SELECT EXISTS (SELECT FROM vectormill.generations WHERE spec ->> 'model' = :model)
        OR EXISTS (SELECT FROM vectormill.jobs WHERE spec ->> 'model' = :model)
    """
)


def is_model_in_use(engine: Engine, model: str) -> bool:
    """Return True if there is a job or a collection of the model."""
    with engine.connect() as connection:
        return bool(connection.execute(IS_IN_USE, {"model": model}).scalar_one())
