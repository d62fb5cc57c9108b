"""The commands of the pages that a newcomer reads run as they stand there, in their order, against a service.

A block in sh, python or sql is run unless a comment before it says why not; blocks without a language show output,
settings, or what only another machine can do.
"""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.blackbox.service import Service, new_service
from tests.docs.pages import Block, find_blocks, find_commands, find_pages

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("sh", "bash", "python", "sql")
# These commands prepare what a page assumes to exist before its own commands are run.
DOCS = """
vectormill collections create docs --keep-text --language english
vectormill status "$(vectormill submit known.jsonl --collection docs)" --watch
"""
ARTICLES = "vectormill collections create articles --keep-text; vectormill collections create handbook"
PREPARED = {
    "README": "", "QUICKSTART": "", "GUIDE": "", "JOBS": "", "MIGRATE": "", "BACKUP": "", "MACHINES": "",
    "SEARCH": DOCS, "COLLECTIONS": "", "SOURCES": ARTICLES, "INDEXES": DOCS, "SIZING": DOCS,
}  # fmt: skip
TEXTS = (
    "How do I read a zip file?",
    "Parse a date from a string.",
    "Compress data without loss.",
    "Is this {}?",
)


def make_application(folder: Path, num_rows: int) -> str:
    """Make the database of an application, with the tables that the pages name, and return its URL."""
    path = folder / "application.db"
    rows = [
        (number, f"The invoice {number % 500} was sent {number % 7} times.", "en", 2020 + number % 6, number)
        for number in range(num_rows)
    ]
    with sqlite3.connect(path) as connection:
        for table in ("articles", "tickets"):
            connection.execute(
                f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, body TEXT, lang TEXT, year INT, updated_at INT)"
            )
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", rows)
    return f"sqlite:///{path}"


@pytest.fixture(scope="module", params=[3_000, pytest.param(50_000, marks=pytest.mark.slow)])
def reader(program: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service as a reader has it: files and tables with the names that the pages use, and the collection docs.

    The table `app.articles` of its own Postgres has vectors of the packaged model, as an application would.
    """
    with new_service(program) as service:
        url = make_application(service.folder, request.param)
        service.environment |= {"ARTICLES_URL": url, "TICKETS_URL": url, "VECTORMILL_INDEX_ROWS": "2000"}
        lines = [json.dumps({"key": f"t{n}", "text": text.format(n)}) for n, text in enumerate(TEXTS * 5)]
        for name in ("texts.jsonl", "docs.jsonl"):
            (service.folder / name).write_text("\n".join(lines))
        known = [{**json.loads(line), "metadata": {"lang": "de", "year": 2024}} for line in lines]
        known[0]["key"] = "json.dumps"
        for name, rows in (("known.jsonl", known), ("rows.jsonl", known)):
            (service.folder / name).write_text("\n".join(map(json.dumps, rows)))
        (service.folder / "keys.txt").write_text("t1\nt2\n")
        (service.folder / "docs").mkdir()
        (service.folder / "docs" / "begin.md").write_text("# How to begin\n\nRead this first.\n")
        service.start()
        service.run("collections", "create", "articles", "--keep-text")
        job = service.run("submit", "docs.jsonl", "--collection", "articles").stdout.strip()
        service.run("status", job, "--watch")
        with psycopg.connect(service.database_url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE of_a_server")
        service.environment["SERVER_URL"] = service.database_url.replace("/vectormill?", "/of_a_server?")
        service.sql("CREATE SCHEMA app")
        service.sql(
            "CREATE TABLE app.articles AS SELECT row_number() OVER () AS id, text AS body, 'en' AS lang,"
            " embedding::vector(384) AS embedding FROM articles"
        )
        yield service


def run_block(service: Service, block: Block) -> None:
    """Run a block in the reader's folder; fail with what it printed."""
    code = block.code.replace("localhost:8000", "127.0.0.1:8000")
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{service.api_port}")
    if block.language == "sql":
        for statement in filter(str.strip, code.split(";")):
            service.sql(statement)
        return
    argv = (
        [sys.executable, "-c", code]
        if block.language == "python"
        else ["bash", "-euo", "pipefail", "-c", code]
    )
    environment = service.environment | {
        "VECTORMILL_DATA_DIR": str(service.data_dir),
        "VECTORMILL_API_URL": service.api_url,
        "PATH": f"{service.program.parent}{os.pathsep}{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        argv, cwd=service.folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{block.place}\n{code}\n{done.stdout}\n{done.stderr}"


def is_run(block: Block) -> bool:
    return block.language in LANGUAGES and block.why_not is None


def blocks_of(page: str) -> list[Block]:
    return list(find_blocks(ROOT / "README.md" if page == "README" else ROOT / f"docs/{page}.md"))


@pytest.mark.parametrize("page", find_pages(), ids=lambda page: page.stem)
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    silent = [
        block.place
        for block in find_blocks(page)
        if (list(find_commands(block)) or block.language in LANGUAGES)
        and block.why_not is None
        and (page.stem not in PREPARED or not is_run(block))
    ]
    assert silent == [], "name the block sh and its page in PREPARED, or say before it why it is not run"


@pytest.mark.parametrize("page", PREPARED)
def test_a_page_runs_from_its_beginning_to_its_end(reader: Service, page: str) -> None:
    for collection in reader.ask("GET", "/v1/collections")["data"]:
        reader.run("collections", "delete", collection["name"], "--force")
    if PREPARED[page]:
        run_block(reader, Block(page, 0, "sh", PREPARED[page], None))
    blocks = [block for block in blocks_of(page) if is_run(block)]
    assert blocks
    for block in blocks:
        run_block(reader, block)
