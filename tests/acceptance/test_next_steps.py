"""Next steps work as they are printed: each is taken from the output, run on the same stack, and has its effect.

They are named by the command, in which 1 stands for a value; tests/docs/test_next_steps.py says of every other command
in a sentence of the product why it is only parsed.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import make_url

from tests.acceptance.stack import Stack
from tests.clusters import connect, new_directory, read_admin_url
from tests.commands import run
from tests.static_models import write_static
from tests.waiting import wait_for
from vectormill.embedded.stack import EmbeddedStack

VECTORMILL: Final = (sys.executable, "-m", "vectormill.cli")
CODE: Final = re.compile(r"`vectormill ([^`]+)`")


@dataclass(frozen=True, slots=True)
class Place:
    """A stack, and the terminal of somebody who works with it."""

    stack: Stack
    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str, status: int | None = 0, **settings: str) -> str:
        """Run a command and return what it printed. Its exit status must be `status`, unless that is None."""
        streams = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
        with (
            patch.dict(os.environ, {**self.environment, **settings}, clear=True),
            chdir(self.folder),
            redirect_stdout(streams[0]),
            redirect_stderr(streams[1]),
        ):
            found = run(*words)
        output = b"".join(stream.buffer.getvalue() for stream in streams).decode()
        assert status is None or found == status, f"{words}: {found}\n{output}"
        return output

    @contextmanager
    def running(self, *words: str, **settings: str) -> Iterator[None]:
        """Run a process beside the stack for the duration of a block."""
        process = subprocess.Popen(
            [*VECTORMILL, *words], env={**self.environment, **settings}, cwd=self.folder
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def take(self, advice: str, output: str, **values: str) -> list[str]:
        """Return the words of the command in `output` that is this advice, with `values` for words in capitals.

        Further options of the command are kept.
        """
        wanted = shlex.split(advice)
        for command in CODE.findall(" ".join(output.split())):
            words = shlex.split(command)
            if len(words) >= len(wanted) and all(
                each in ("1", word) for each, word in zip(wanted, words, strict=False)
            ):
                return [values.get(word, word) for word in words]
        raise AssertionError(f"`vectormill {advice}` is not in: {output}")

    def submit(self, *words: str) -> tuple[str, str]:
        """Submit a job; return its id and what was printed besides."""
        job, _, told = self.run("submit", *words).partition("\n")
        return job, told


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A stack that was started by the command that is printed where none runs."""
    with new_directory() as directory:
        data_dir = directory / "data"
        own = {name: value for name, value in os.environ.items() if not name.startswith("VECTORMILL_")}
        stack = Stack(data_dir)
        del stack.environment["VECTORMILL_OUTPUT_ROOT"]
        environment = {**own, "VECTORMILL_DATA_DIR": str(data_dir)}
        place = Place(stack, tmp_path_factory.mktemp("work"), environment)
        told = place.run("jobs", "--data-dir", str(data_dir), status=3)
        assert (
            place.take("up --data-dir 1", told) == ["up", "--data-dir", str(data_dir)] == stack.command()[3:6]
        )
        (place.folder / "texts.jsonl").write_text(
            '{"key": "a", "text": "zip files"}\n{"key": "b", "text": "dates"}\n'
        )
        (place.folder / "long.jsonl").write_text(json.dumps({"key": "a", "text": "word " * 2000}) + "\n")
        try:
            stack.start()
            yield place
        finally:
            stack.destroy()
            EmbeddedStack(data_dir).destroy()


@dataclass(frozen=True, slots=True)
class Situation:
    """An advice, the command that is refused with it, and a command that works once the advice was followed."""

    advice: str
    met: Sequence[str]
    effect: Sequence[str] = ()


# In this order: each may use what those before it made.
SITUATIONS: Final = (
    Situation("collections create 1", ["sources", "show", "papers"], ["collections", "show", "papers"]),
    Situation("sources set 1 --help", ["sources", "show", "papers"]),
    Situation("collections show 1", ["collections", "create", "papers"]),
    Situation("collections list", ["collections", "show", "nothing"]),
    Situation("schedules list", ["schedules", "show", "nothing"]),
    Situation("keys list", ["keys", "revoke", "nobody"]),
)


def test_a_printed_command_does_what_its_sentence_says(place: Place) -> None:
    for situation in SITUATIONS:
        told = place.run(*situation.met, status=2)
        place.run(*place.take(situation.advice, told))
        if situation.effect:
            place.run(*situation.effect)


def test_the_commands_of_a_stack_that_is_ready_encode_and_find_a_file(place: Place) -> None:
    wait_for(lambda: "\nready" in place.stack.log.read_text(), 60)
    log = place.stack.log.read_text()
    told = place.run(*place.take("submit 1 --collection docs", log, FILE="texts.jsonl"))
    place.run(*place.take("status 1 --watch", told))
    found = place.run(*place.take('search docs "1"', log, WORDS="how do I read a zip file"))
    assert found.splitlines()[1].split()[1] == "a"  # below the titles


def test_a_text_that_was_cut_is_listed_by_the_command_that_is_told(place: Place) -> None:
    job, told = place.submit("long.jsonl")
    place.run(*place.take("status 1 --watch", told))
    told = place.run("status", job)
    assert place.run(*place.take("truncated 1", told)).split()[0] == "a"


def test_a_model_is_added_and_served_by_the_commands_that_are_told(place: Place) -> None:
    model = write_static(place.folder / "words", normalize=True)
    told = place.run("submit", "texts.jsonl", "--model", model.name, status=2)
    told = place.run(*place.take("models add 1", told, **{"NAME|PATH": str(model)}))
    serve = place.take("worker --model 1", told)
    job, told = place.submit("texts.jsonl", "--model", model.name)
    assert place.take("worker --model 1", told) == serve
    place.run("pause", job)
    told = place.run("status", job)
    place.run(*place.take("resume 1", told))
    with place.running(*serve):
        place.run("status", job, "--watch")


def test_jobs_write_to_a_folder_of_the_machine_once_the_setting_that_is_named_is_set(place: Place) -> None:
    folder = place.folder / "vectors"
    order = ("submit", f"file://{place.folder}/texts.parquet", "--to", f"file://{folder}")
    pq.write_table(pa.table({"key": ["a"], "text": ["zip files"]}), place.folder / "texts.parquet")
    told = " ".join(place.run(*order, status=2).split())
    found = re.search(r"`(VECTORMILL_OUTPUT_ROOT=\S+) vectormill ([^`]+)`", told)
    assert found is not None, told
    assert shlex.split(found[2]) == ["up", "--data-dir", str(place.stack.data_dir)]
    place.stack.stop()
    place.stack.environment |= dict([shlex.split(found[1])[0].split("=", 1)])
    place.stack.start()
    told = place.run(*order)
    place.run(*place.take("status 1 --watch", told))
    wait_for(lambda: list(folder.glob("*.parquet")), 60)


def test_a_database_that_was_never_migrated_is_migrated_by_the_command_that_is_told(place: Place) -> None:
    url = place.stack.urls()["database_url"]
    admin_url = read_admin_url(place.stack.data_dir, url)
    with connect(admin_url) as connection:  # with one role, as an operator gives it
        connection.execute("CREATE DATABASE empty_one OWNER vectormill_service")
    with connect(admin_url.replace("/vectormill?", "/empty_one?")) as connection:
        connection.execute("CREATE EXTENSION vector; GRANT CREATE ON SCHEMA public TO vectormill_service")
    empty = make_url(url).set(database="empty_one").render_as_string(hide_password=False)
    told = place.run("keys", "list", status=2, VECTORMILL_DATABASE_URL=empty)
    place.run(*place.take("migrate", told), VECTORMILL_DATABASE_URL=empty)
    place.run("keys", "list", VECTORMILL_DATABASE_URL=empty)


def test_an_api_is_closed_and_opened_by_the_commands_that_are_told(place: Place) -> None:
    told = place.run("api", "--host", "0.0.0.0", status=2)
    place.run(*place.take("keys create 1", told, NAME="first"))
    wait_for(lambda: "requires a key" in place.run("jobs", status=None), 30)  # the API caches keys for 3 s
    told = place.run("jobs", status=2)
    key = place.run(*place.take("keys create 1", told, NAME="second")).split()[0]
    wait_for(lambda: "Unknown API key" not in place.run("jobs", status=None, VECTORMILL_API_KEY=key), 30)
    place.run("jobs", VECTORMILL_API_KEY=key)
    told = place.run("jobs", status=2, VECTORMILL_API_KEY="vmk_" + "0" * 64)
    assert "second" in place.run(*place.take("keys list", told))
