"""Who has the extras of a role can run that role, and whoever has none is told which to get: with real imports, where
what such an environment would lack is not found."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from tests.architecture.extras import CLUSTERS, EXTRAS, find_distributions, find_foreign, find_importable
from tests.architecture.sources import PACKAGES, ROOT, find_imports_of, find_sources
from vectormill.domain.encoding import EncodingSpec
from vectormill.extras import compose_install
from vectormill.objects.manifest import MANIFEST, Manifest, OutputPart, make_part_schema

# Before all else in sys.path; says of what is not to be there that it is not.
WITHOUT = """
import sys

ABSENT = frozenset({absent!r})

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
HEAVY = {
    "torch", "psycopg", "sqlalchemy", "celery", "kombu", "redis", "fastapi", "pyarrow", "alembic", "zstandard",
}  # fmt: skip


def run(program: str, *extras: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """In an interpreter that has what pip installs with these extras."""
    source = WITHOUT.format(absent=sorted(find_foreign(*extras))) + program
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VECTORMILL_")}
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


def command(*arguments: str) -> str:
    return f"from vectormill.cli import main\nmain({list(arguments)!r})\n"


def test_the_client_alone_brings_neither_torch_nor_a_driver_nor_a_server() -> None:
    assert not find_importable() & HEAVY
    assert len(find_distributions()) < 30


@pytest.mark.parametrize(
    ("extra", "packages"), [("server", ("api", "scheduler", "indexer")), ("worker", ("worker",))]
)
def test_a_role_s_extra_brings_what_its_packages_import(extra: str, packages: tuple[str, ...]) -> None:
    there = find_importable(extra) | sys.stdlib_module_names | set(PACKAGES)
    lacking = {
        f"{path}: {name}"
        for path in find_sources(*packages)
        for name in find_imports_of(path)
        if name.partition(".")[0] not in there
    }
    assert not lacking, "the extra's list in pyproject.toml has to name it"


# Developers need the first, and few users the others: programs into which outputs are loaded, and clusters.
ALONE = {"dev", "iceberg", "lancedb", "qdrant", *CLUSTERS}


def test_all_brings_what_every_other_extra_does_but_no_cluster() -> None:
    assert find_distributions("all") == find_distributions(*(name for name in EXTRAS if name not in ALONE))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_s_extra_brings_what_encodes_and_its_module_says_which_it_is(cluster: str) -> None:
    assert find_distributions("worker") < find_distributions(cluster)
    name = "Encoder" if cluster == "ray" else "embed"
    told = run(f"from vectormill.integrations.{cluster} import {name}\n{name}('text')")
    assert compose_install(cluster) in told.stderr


def test_every_command_tells_its_help_and_the_client_is_there_with_the_base_alone() -> None:
    told = run(
        "import vectormill\nfrom vectormill import Client\n"
        "from typer.main import get_command\nfrom vectormill.cli.app import app, main\n"
        "for name in get_command(app).commands:\n"
        "    try:\n        main([name, '--help'])\n"
        "    except SystemExit as end:\n        assert not end.code, name\n"
        "main(['--version'])"
    )
    assert told.returncode == 0, told.stderr
    assert "vectormill worker" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("api",), "server"),
        (("scheduler",), "server"),
        (("indexer",), "server"),
        (("migrate",), "server"),
        (("worker",), "worker"),
        (("plan",), "worker"),
        (("flower",), "flower"),
        (("up",), "all"),
        (("demo",), "all"),
        (("load", "pgvector", "/", "--database-url", "postgresql://127.0.0.1:1/none", "--table", "a"), "all"),
        (("load", "qdrant", "/", "--collection", "a"), "qdrant"),
        (("load", "lancedb", "/", "--uri", "/", "--table", "a"), "lancedb"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value,
)
def test_a_command_whose_packages_are_not_there_says_what_to_install(
    arguments: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    place = "postgresql://127.0.0.1:1/none"
    told = run(
        command(*arguments),
        VECTORMILL_DATABASE_URL=place,
        VECTORMILL_REDIS_URL="redis://127.0.0.1:1",
        VECTORMILL_DATA_DIR=str(tmp_path),
    )
    assert compose_install(extra) in told.stderr
    assert "Traceback" not in told.stderr
    assert told.returncode == 2


def test_a_file_that_needs_a_package_says_which_extra_has_it(tmp_path: Path) -> None:
    texts = tmp_path / "texts.parquet"
    texts.write_bytes(b"PAR1")
    told = run(
        command("encode", str(texts), "-o", str(tmp_path / "a.jsonl"), "--api-url", "http://127.0.0.1:1")
    )
    assert compose_install("dataframes") in told.stderr
    assert told.returncode == 2


def test_an_output_is_read_with_the_extra_of_tables_which_is_named_where_it_is_missing(
    tmp_path: Path,
) -> None:
    spec = EncodingSpec("m", "1", "mean", True, 3, "", 64)
    row = {"key": "a", "content_hash": bytes(16), "embedding": [0.0] * 3, "metadata": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row], make_part_schema(spec)), tmp_path / "part")
    parts = [OutputPart("part", 0, 1, (tmp_path / "part").stat().st_size)]
    manifest = Manifest(
        job_id="j", state="completed", spec=spec.to_json(), num_items=1, num_rows=1, num_failed=0,
        metadata={}, finished_at="2026-01-01", parts=parts,
    )  # fmt: skip
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    program = f"import vectormill\nprint(vectormill.read_table({tmp_path.as_uri()!r})['key'])"
    assert compose_install("dataframes") in run(program).stderr
    assert '"a"' in run(program, "dataframes").stdout
