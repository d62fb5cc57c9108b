"""The roles of Postgres by which Vectormill connects: owner, service and reader. Knows no table."""

import hmac
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg import sql

from vectormill.addresses import to_libpq
from vectormill.domain.errors import ConfigurationError
from vectormill.settings import Settings

FOLDER: Final = Path(__file__).parent
OWNERSHIP: Final = "ownership.sql"
SCRIPTS: Final = ("roles.sql", "granted.sql", OWNERSHIP)


@dataclass(frozen=True, slots=True)
class Roles:
    """The names of the three roles: who migrates, who serves, and who reads what queries of sources name."""

    owner: str = "vectormill_owner"
    service: str = "vectormill_service"
    reader: str = "vectormill_reader"


def find_roles(settings: Settings) -> tuple[Roles, dict[str, str]]:
    """Return the roles of the settings' URLs, by default those of their names, and the passwords by role.

    Raise ConfigurationError if two have the same role.
    """
    service = settings.database_url if settings.owner_database_url else None
    urls = [
        urlsplit(url or "") for url in (settings.owner_database_url, service, settings.reader_database_url)
    ]
    defaults = asdict(Roles()).values()
    names = [unquote(url.username or default) for url, default in zip(urls, defaults, strict=True)]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            "Owner, service and reader need a role each: VECTORMILL_OWNER_DATABASE_URL, VECTORMILL_DATABASE_URL and "
            "VECTORMILL_READER_DATABASE_URL must have different users."
        )
    return Roles(*names), {
        name: unquote(url.password) for name, url in zip(names, urls, strict=True) if url.password
    }


def connect_alone(url: str) -> psycopg.Connection[Any]:
    """Return a connection that commits each statement by itself, and waits a minute for a lock at most."""
    return psycopg.connect(to_libpq(url), autocommit=True, options="-c lock_timeout=60000")


def run_as_admin(admin_url: str, roles: Roles, passwords: dict[str, str], *, is_own: bool) -> None:
    """Make the roles as the administrator of this URL. Raise ConfigurationError."""
    try:
        with connect_alone(admin_url) as connection:
            make_roles(connection, roles, passwords, is_own=is_own)
    except psycopg.Error as error:
        raise ConfigurationError(f"The roles could not be made: {str(error).splitlines()[0]}.") from error


def derive_url(admin_url: str, role: str) -> str:
    """Return the URL of a role of an embedded server, whose password is derived from the administrator's."""
    parts = urlsplit(admin_url)
    password = hmac.digest(unquote(parts.password or "").encode(), role.encode(), "sha256").hex()
    return parts._replace(netloc=f"{role}:{password}@{parts.netloc.rpartition('@')[2]}").geturl()


def write_script(roles: Roles, *, is_own: bool) -> str:
    """Return the script for psql that makes the roles, and gives them what they need in its database."""
    values = asdict(roles) | {"own": "yes" if is_own else "no"}
    settings = "".join(
        f"\\set {name} {sql.Literal(value).as_string(None)}\n" for name, value in values.items()
    )
    passwords = "".join(
        f"\\password {sql.Identifier(name).as_string(None)}\n" for name in asdict(roles).values()
    )
    return settings + "".join((FOLDER / name).read_text() for name in SCRIPTS) + passwords


def make_roles(
    connection: psycopg.Connection[Any], roles: Roles, passwords: dict[str, str], *, is_own: bool
) -> None:
    """Make the roles, give them what they need, and set their passwords, by the names of the roles.

    The connection commits each statement by itself, and is that of a superuser, or of a role that may create roles.
    `is_own` tells that the database has nothing but Vectormill and the tables that it encodes. Raise psycopg.Error.
    """
    values = asdict(roles) | {"own": "yes" if is_own else "no"}
    for name in SCRIPTS:
        run_script(connection, name, values)
    for name, password in passwords.items():
        hashed = connection.pgconn.encrypt_password(password.encode(), name.encode()).decode()
        alter = sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}")
        connection.execute(alter.format(sql.Identifier(name), sql.Literal(hashed)))


def assign_owners(connection: psycopg.Connection[Any], service: str) -> None:
    """Give the service what the migrations of this connection's role have made, as far as it needs it.

    Raise ConfigurationError if this role may not.
    """
    owner = connection.execute("SELECT current_user").fetchone()
    assert owner is not None
    try:
        run_script(connection, OWNERSHIP, {"owner": owner[0], "service": service})
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"The role {owner[0]} may not give {service} its tables: {str(error).splitlines()[0]}. Run the script that "
            "`vectormill roles` prints as a superuser."
        ) from error


def run_script(connection: psycopg.Connection[Any], name: str, values: dict[str, str]) -> None:
    for query in read_queries(name, values):
        for (statement,) in connection.execute(query.encode()).fetchall():
            connection.execute(statement.encode())


def read_queries(name: str, values: dict[str, str]) -> Iterator[str]:
    """Yield the queries of a script, each of which returns statements to run, with its values as literals."""
    text = (FOLDER / name).read_text()
    for variable, value in values.items():
        text = text.replace(f":'{variable}'", sql.Literal(value).as_string(None))
    yield from text.split("\\gexec")[:-1]
