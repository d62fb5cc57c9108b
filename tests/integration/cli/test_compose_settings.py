"""Compose's Postgres takes the settings that it is started with: a misspelt one would keep it from starting."""

from pathlib import Path

import psycopg
import pytest
import yaml
from sqlalchemy import Engine

COMPOSE = yaml.safe_load(
    (Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text(encoding="utf-8")
)
FLAGS = [flag.removeprefix("--").partition("=") for flag in COMPOSE["services"]["postgres"]["command"][1:]]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, value in FLAGS])
def test_postgres_knows_the_setting_and_takes_its_value(engine: Engine, name: str, value: str) -> None:
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        # Refused when either is wrong, and without effect until a start that never comes.
        connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        connection.execute(f"ALTER SYSTEM RESET {name}".encode())
