"""What an engine of ours does with what clients sent."""

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError


def test_an_error_of_a_statement_does_not_quote_what_a_client_sent(engine: Engine) -> None:
    failing = text("SELECT 1 / length(:empty) WHERE :query <> ''")
    with engine.connect() as connection, pytest.raises(DBAPIError, match="division by zero") as raised:
        connection.execute(failing, {"empty": "", "query": "what nobody else is to read"})
    assert "nobody else" not in str(raised.value)
