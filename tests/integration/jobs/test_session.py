"""What an engine of ours does with what clients sent."""

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from vectormill.db.session import make_engine

PREPARED = text("SELECT count(*) FROM pg_prepared_statements")
LOCK_TIMEOUT = text("SELECT current_setting('lock_timeout')")


def test_an_error_of_a_statement_does_not_quote_what_a_client_sent(engine: Engine) -> None:
    failing = text("SELECT 1 / length(:empty) WHERE :query <> ''")
    with engine.connect() as connection, pytest.raises(DBAPIError, match="division by zero") as raised:
        connection.execute(failing, {"empty": "", "query": "what nobody else is to read"})
    assert "nobody else" not in str(raised.value)


@pytest.mark.parametrize(("option", "is_pooled"), [({}, False), ({"pgbouncer": "true"}, True)])
def test_behind_a_pooler_nothing_is_prepared_and_nothing_is_set_when_a_connection_is_opened(
    engine: Engine, option: dict[str, str], is_pooled: bool
) -> None:
    url = engine.url.update_query_dict(option).render_as_string(hide_password=False)
    pooled = make_engine(url, application_name="test")
    with pooled.connect() as connection:
        for _ in range(10):  # the driver prepares what it repeats
            connection.execute(text("SELECT :number + CAST(1 AS int)"), {"number": 1})
        assert (connection.execute(PREPARED).scalar_one() == 0) == is_pooled
        assert (connection.execute(LOCK_TIMEOUT).scalar_one() == "20s") != is_pooled
    pooled.dispose()
