"""Compose's Postgres takes the settings that it is started with: a misspelt one would keep it from starting."""

import re
from pathlib import Path

import yaml

from tests.clusters import connect

COMPOSE = yaml.safe_load(
    (Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text(encoding="utf-8")
)
FLAGS = [flag.removeprefix("--").partition("=") for flag in COMPOSE["services"]["postgres"]["command"][1:]]


def test_postgres_knows_each_setting_and_takes_its_value(postgres_url: str) -> None:
    with connect(postgres_url) as connection:
        for name, _, value in FLAGS:
            # Refused when either is wrong, and without effect until a start that never comes.
            default = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
            connection.execute(f"ALTER SYSTEM SET {name} = '{default}'".encode())
            connection.execute(f"ALTER SYSTEM RESET {name}".encode())
