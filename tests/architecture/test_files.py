"""What a file may be called, and who may read the environment."""

import ast
import re

from tests.architecture.sources import PACKAGES, ROOT, find_imports_of, find_sources, parse

VAGUE_NAMES = frozenset(
    {"utils", "util", "helpers", "helper", "common", "misc", "base", "shared", "stuff", "manager"}
)
ENVIRONMENT_READERS = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})

STARTS = re.compile(r"subprocess\.(Popen|run|call|check_\w+)$|os\.(exec|spawn|posix_spawn|popen|system)")
STARTERS = {
    "vectormill/processes/parent_death.py",  # what `spawn` starts, which then becomes the program
    "vectormill/processes/lifetimes.py",
    "vectormill/models/card_reader.py",  # with nothing of the environment
    "vectormill/db/backup.py",  # Postgres' own programs
    "worker/runner/runner.py",  # in the environment that RunnerStarter makes
}


def test_every_file_and_folder_says_what_is_in_it() -> None:
    vague = [str(path) for path in find_sources() if VAGUE_NAMES & {path.stem, *path.parent.parts}]
    assert vague == [], "name each after what is in it"


def test_each_format_of_rows_is_parsed_in_one_module() -> None:
    """Two parsers of one grammar agree until a file comes that they read differently."""
    found: dict[str, set[str]] = {"csv": set(), "pyarrow.parquet": set(), "decode_lines": set()}
    for path in find_sources("api", "indexer", "scheduler", "vectormill", "worker"):
        tree = parse(path)
        for name in find_imports_of(path) & found.keys():
            found[name].add(str(path))
        if any(isinstance(node, ast.Attribute) and node.attr == "decode_lines" for node in ast.walk(tree)):
            found["decode_lines"].add(str(path))
    assert found == {
        "csv": {"vectormill/rows/decoding.py"},
        "pyarrow.parquet": {"vectormill/files/parquet.py"},
        "decode_lines": {"vectormill/rows/decoding.py"},
    }


def test_alembic_is_no_package_or_it_would_shadow_the_library() -> None:
    assert not list((ROOT / "alembic").rglob("__init__.py"))


def test_tests_are_no_packages_so_that_two_files_may_carry_one_name() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def find_environment_readers(tree: ast.Module) -> list[int]:
    """Return the lines that name os.environ or one of its kin, by attribute or by import."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & ENVIRONMENT_READERS:
            lines.append(node.lineno)
    return lines


def test_type_checkers_see_the_names_of_every_module() -> None:
    hiding = [
        str(path)
        for path in find_sources(*PACKAGES)
        if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in parse(path).body)
    ]
    assert hiding == [], (
        "a __getattr__ that type checkers see makes them accept any name: put it under `else`"
    )


def test_few_files_start_programs() -> None:
    starters = {
        str(path)
        for path in find_sources(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and STARTS.match(ast.unparse(node.func))
    }
    assert starters == STARTERS, (
        "start it by `spawn`, with an environment from `process_environment`: "
        "in another one Python imports from the current folder, which is the user's"
    )


def test_only_settings_files_read_the_environment() -> None:
    readers = [
        f"{path}:{line}"
        for path in find_sources(*PACKAGES, "alembic")
        if path.name != "settings.py"
        for line in find_environment_readers(parse(path))
    ]
    assert readers == [], (
        "settings are read once in settings.py and passed down; "
        "a child's environment is an argument of whoever starts it"
    )
