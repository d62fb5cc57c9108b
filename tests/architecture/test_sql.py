"""What the statements of the project have in common, read from their text."""

import ast
import re
from pathlib import Path

from tests.architecture.sources import FEATURES, PACKAGES, find_imports_of, find_sources, parse, read_source

STATEMENT = re.compile(r'"""(.*?)"""', re.DOTALL)
NUMBER = r"(?::[a-z_]+|(?<![\w.])\d+)"
COMPUTED = re.compile(rf"{NUMBER} *[-+*/] *:[a-z_]+|:[a-z_]+ *[-+*/] *{NUMBER}")


def find_untyped(source: str) -> list[str]:
    """Return what the statements of a source compute with a parameter that has no type, each with its line."""
    return [
        f"{count_lines(source, statement.start(1) + found.start())}: {found[0]}"
        for statement in STATEMENT.finditer(source)
        for found in COMPUTED.finditer(statement[1])
    ]


def count_lines(source: str, end: int) -> int:
    return source.count("\n", 0, end) + 1


def test_a_number_that_sql_computes_with_has_a_type() -> None:
    # The driver sends the smallest type that holds the value: 256 * 1,536 overflowed a smallint.
    untyped = [
        f"{path}:{found}" for path in find_sources(*PACKAGES) for found in find_untyped(read_source(path))
    ]
    assert untyped == [], "compute it in Python, or write CAST(:name AS bigint)"


SQL = re.compile(r"\b(SELECT|UPDATE|INSERT INTO|DELETE FROM)\b")
SPELLED = re.compile(r"\bstate (NOT )?IN \('")


def test_a_set_of_states_stands_in_statements_by_its_name() -> None:
    spelled = [
        f"{path}:{count_lines(source, found.start())}"
        for path in find_sources(*PACKAGES)
        for source in [read_source(path)]
        for found in SPELLED.finditer(source)
    ]
    assert spelled == [], "name the set in the domain, beside the rows of states, and write state IN {NAME}"


def find_composed(tree: ast.AST) -> list[str]:
    """Return what stands in the statements of a source and is no constant."""
    return [
        f"{string.lineno}: {ast.unparse(part.value)}"
        for string in ast.walk(tree)
        if isinstance(string, ast.JoinedStr) and SQL.search(ast.unparse(string))
        for part in string.values
        if isinstance(part, ast.FormattedValue)
        and not (isinstance(part.value, ast.Name) and part.value.id.isupper())
    ]


# These compose statements of their own constants, by functions.
COMPOSERS = (Path("vectormill/work/work.py"), Path("vectormill/jobs/transitions.py"))


def test_statements_are_composed_of_constants_alone() -> None:
    composed = [
        f"{path}:{found}"
        for path in find_sources("vectormill")
        if path not in COMPOSERS and not path.is_relative_to("vectormill/cli")
        for found in find_composed(parse(path))
    ]
    assert composed == [], "what a user sends is a parameter"


ADDED = r"INSERT INTO vectormill\.(?:chunks|job_increments)\b|INSERT INTO vectormill\.jobs\s*\([^)]*num_open_chunks"
CHANGED = (
    r"UPDATE vectormill\.(?P<table>chunks|jobs)(?: AS \w+)?\s+SET (?P<columns>(?:(?!\bFROM\b|\bWHERE\b).)*)"
)
MOVES = {
    "chunks": re.compile(r"(?<![\w.])state\s*="),
    "jobs": re.compile(r"(?<![\w.])num_\w+\s*=|{additions}"),
}


def find_moves(source: str) -> list[str]:
    """Return the lines at which a source adds chunks, changes their states or moves counters of jobs."""
    added = [found.start() for found in re.finditer(ADDED, source)]
    changed = [
        found.start()
        for found in re.finditer(CHANGED, source, re.DOTALL)
        if MOVES[found["table"]].search(found["columns"])
    ]
    return [str(count_lines(source, start)) for start in sorted(added + changed)]


def test_one_module_writes_states_of_chunks_and_counters_of_jobs() -> None:
    moves = {path: found for path in find_sources(*PACKAGES) if (found := find_moves(read_source(path)))}
    assert len(moves.pop(Path("vectormill/jobs/transitions.py"))) >= 10
    assert moves == {}, "what becomes of a chunk stands in vectormill/jobs/transitions.py"


# Those below were of commits before the first release.
FIRST_MIGRATION = 26


def test_migrations_are_numbered_in_one_line() -> None:
    # Two of one number, landed side by side, and no database can be migrated.
    for number, path in enumerate(find_sources("alembic/versions"), start=FIRST_MIGRATION):
        values = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in parse(path).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_revision(node)
        }
        before = f"{number - 1:04}" if number > FIRST_MIGRATION else None
        assert path.name.startswith(f"{number:04}_"), path
        assert values == {"revision": f"{number:04}", "down_revision": before}, path


# The migrations before this number were released with indexes that are built under a lock, and are kept as they are.
BEFORE_BUILD_INDEX = 42
ON_TABLE = re.compile(r"CREATE (?:UNIQUE )?INDEX\s+(?!CONCURRENTLY).*?\sON\s+(vectormill\.\w+)", re.DOTALL)


def test_a_migration_builds_indexes_of_tables_that_exist_without_locking_them() -> None:
    for number, path in enumerate(find_sources("alembic/versions"), start=FIRST_MIGRATION):
        source = path.read_text(encoding="utf-8")
        found = set(ON_TABLE.findall(source)) | set(re.findall(r"op\.create_index\((.*)\)", source))
        own = set(re.findall(r"CREATE TABLE (vectormill\.\w+)", source))
        assert number < BEFORE_BUILD_INDEX or found <= own, f"{path}: use build_index for {found - own}"


def is_revision(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) in ("revision", "down_revision")


# What lives as long as a session: behind a pooler a session is a transaction.
SESSION_STATE = re.compile(
    r"LISTEN|pg_(?:try_)?advisory_lock|set_config\([^()]*, *false|execute\(text\(f?[\"']SET (?!LOCAL)"
)

OF_THE_SCHEDULER = (Path("vectormill/db/locks.py"), Path("vectormill/jobs/dispatch.py"))


def test_only_the_scheduler_keeps_anything_in_its_session() -> None:
    kept = [
        (path, f"{path}:{count_lines(source, found.start())}: {found[0]}")
        for path in find_sources(*PACKAGES)
        for source in [read_source(path)]
        for found in SESSION_STATE.finditer(source)
    ]
    assert kept, "what is looked for is no longer found where it is known to be"
    assert [place for path, place in kept if path not in OF_THE_SCHEDULER] == [], (
        "docs/POSTGRES.md, Connections: PgBouncer"
    )


# What asks somebody's database, or a server about itself.
OTHER_DATABASES = frozenset({"vectormill/cli/doctor.py", "vectormill/embedded"})


def test_statements_stand_in_db_and_in_the_folders_of_features_alone() -> None:
    elsewhere = [
        str(path)
        for path in find_sources(*PACKAGES)
        if "sqlalchemy.text" in find_imports_of(path)
        and not any(
            path.is_relative_to(place)
            for place in ("vectormill/db", "vectormill/work", *FEATURES, *OTHER_DATABASES)
        )
    ]
    assert elsewhere == [], "move the statements into vectormill/db, or into the folder of their feature"
