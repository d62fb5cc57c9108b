"""What the statements of the project have in common, read from their text."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, find_imports, find_sources, parse

STATEMENT = re.compile(r'"""(.*?)"""', re.DOTALL)
NUMBER = r"(?::[a-z_]+|(?<![\w.])\d+)"
COMPUTED = re.compile(rf"{NUMBER} *[-+*/] *:[a-z_]+|:[a-z_]+ *[-+*/] *{NUMBER}")


@pytest.mark.parametrize("path", find_sources(*PACKAGES), ids=str)
def test_a_number_that_sql_computes_with_has_a_type(path: Path) -> None:
    # The driver sends the smallest type that holds the value: 256 * 1,536 overflowed a smallint.
    statements = STATEMENT.findall((ROOT / path).read_text(encoding="utf-8"))
    untyped = [found for statement in statements for found in COMPUTED.findall(statement)]
    assert not untyped, "compute it in Python, or write CAST(:name AS bigint)"


def test_migrations_are_numbered_in_one_line() -> None:
    # Two of one number, landed side by side, and no database can be migrated.
    for number, path in enumerate(find_sources("alembic/versions"), start=1):
        values = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in parse(path).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_revision(node)
        }
        before = f"{number - 1:04}" if number > 1 else None
        assert path.name.startswith(f"{number:04}_"), path
        assert values == {"revision": f"{number:04}", "down_revision": before}, path


def is_revision(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) in ("revision", "down_revision")


# What lives as long as a session: behind a pooler a session is a transaction.
SESSION_STATE = re.compile(
    r"LISTEN|pg_(?:try_)?advisory_lock|set_config\([^()]*, *false|execute\(text\(f?[\"']SET (?!LOCAL)"
)

SCHEDULERS = (Path("scheduler/main.py"), Path("vectormill/db/election.py"))


@pytest.mark.parametrize("path", find_sources(*PACKAGES), ids=str)
def test_only_the_scheduler_keeps_anything_in_its_session(path: Path) -> None:
    found = SESSION_STATE.findall((ROOT / path).read_text(encoding="utf-8"))
    assert not found or path in SCHEDULERS, "docs/OPERATIONS.md, Connections: PgBouncer"


# What asks somebody's database, or a server about itself.
OTHER_DATABASES = frozenset(
    {"vectormill/sources/kinds/sql.py", "vectormill/cli/servers.py", "vectormill/embedded"}
)


@pytest.mark.parametrize("path", find_sources(*PACKAGES), ids=str)
def test_statements_stand_in_db_alone(path: Path) -> None:
    is_db = path.is_relative_to("vectormill/db") or any(
        path.is_relative_to(other) for other in OTHER_DATABASES
    )
    assert is_db or "sqlalchemy.text" not in find_imports(parse(path)), "move it into vectormill/db"
