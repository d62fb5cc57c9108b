"""Every command that writes a file, on every kind of target, beside an oracle that says what must happen."""

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, encode_waiting, encoding_meanwhile
from tests.architecture.sources import ROOT
from tests.commands import run
from tests.services import connected_engine, migrated_database
from tests.unit.certificates.test_certificates import CERTIFICATE
from vectormill.cli import exits, jobs
from vectormill.client import Client

LINES = '{"key": "ä", "text": "one"}\n{"key": "ü", "text": " "}\n'
NOBODY = 65534
BEFORE = b"before"


def read_lines(content: bytes) -> list[str]:
    return [json.loads(line)["key"] for line in content.splitlines()]


def read_parquet(content: bytes) -> list[str]:
    return list(pq.read_table(io.BytesIO(content))["key"].to_pylist())


def read_npy(content: bytes) -> list[str]:
    return ["ä"] * len(np.load(io.BytesIO(content)))


@dataclass(frozen=True)
class Writer:
    """A command that writes a file: its words, for the path of the file, and what its complete output is read as."""

    words: tuple[str, ...]
    read: Callable[[bytes], Any]
    content: Any = ("ä",)
    code: int = 0
    has_input: bool = False
    is_private: bool = False


ENCODE = ("encode", "IN", "--dimensions", "8", "-o")
WRITERS = {
    "encode": Writer((*ENCODE, "OUT", "--format", "parquet"), read_parquet, code=1, has_input=True),
    "encode npy": Writer((*ENCODE, "OUT", "--format", "npy"), read_npy, code=1, has_input=True),
    "encode --errors": Writer(
        (*ENCODE, "ELSEWHERE", "--errors", "OUT"), read_lines, ("ü",), code=1, has_input=True
    ),
    "export": Writer(("export", "JOB", "--format", "ndjson", "-o", "OUT"), read_lines),
    "export parquet": Writer(("export", "JOB", "--format", "parquet", "-o", "OUT"), read_parquet),
    "export npy": Writer(("export", "JOB", "--format", "npy", "-o", "OUT"), read_npy),
    "collections": Writer(("collections", "export", "docs", "--format", "ndjson", "-o", "OUT"), read_lines),
    "collections parquet": Writer(
        ("collections", "export", "docs", "--format", "parquet", "-o", "OUT"), read_parquet
    ),
    "certificate": Writer(
        ("certificate", "JOB", "-o", "OUT"),
        lambda content: [type(json.loads(line)) for line in content.splitlines()][:1],
        (dict,),
    ),
    "backup": Writer(("backup", "OUT"), lambda content: [content[:5]], (b"PGDMP",), is_private=True),
    "certify": Writer(
        ("certify", "MODEL", "--to", "OUT"),
        lambda content: [json.loads(content)["model"]],
        (CERTIFICATE.model,),
        code=1,
    ),
}


@pytest.fixture(scope="module")
def engine(postgres_url: str) -> Iterator[Engine]:
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with api_client(engine) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def job(url: str, engine: Engine) -> str:
    with Client(url) as client:
        job = client.submit(map(json.loads, LINES.splitlines()), dimensions=8)
        client.submit(map(json.loads, LINES.splitlines()), dimensions=8, collection="docs")
        encode_waiting(engine)
        return str(job["id"])


Say = Callable[[str, Path], tuple[int, str]]


@pytest.fixture
def say(
    job: str, url: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Say]:  # fmt: skip
    """Run a writer on a path; return its exit code and what it says on stderr."""
    monkeypatch.setenv("VECTORMILL_API_URL", url)
    monkeypatch.setenv("VECTORMILL_DATABASE_URL", engine.url.render_as_string(hide_password=False))
    monkeypatch.setattr("vectormill.cli.encode.watch_job", partial(jobs.watch_job, poll_seconds=0.01))
    monkeypatch.setattr("vectormill.models.registry.open_registry", lambda *_: Models(tmp_path / "model"))
    monkeypatch.setattr("worker.certificates.measuring.certify", lambda *_: CERTIFICATE)
    (tmp_path / "in.jsonl").write_text(LINES)
    (tmp_path / "folder").mkdir()

    def run_writer(name: str, out: Path) -> tuple[int, str]:
        named = {"OUT": str(out), "IN": str(tmp_path / "in.jsonl"), "JOB": job, "MODEL": "some/model"}
        named["ELSEWHERE"] = str(tmp_path / "elsewhere.jsonl")
        capfd.readouterr()
        code = run(*(named.get(word, word) for word in WRITERS[name].words))
        return code, capfd.readouterr().err

    with encoding_meanwhile(engine):
        yield run_writer


@dataclass(frozen=True)
class Models:
    """The registry with a model that is not read, in a folder that no output is in."""

    path: Path

    def card(self, *_: Any, **__: Any) -> "Models":
        return self


# The kinds of targets. Of a file, how the command is led to it: by its name, or by links.
FILES = ("new", "existing", "link", "dangling link", "link to a link")
STREAMS = ("pipe", "stdout", "stdout that appends to a file", "closed stdout", "full device")
SAME = ("the input", "a link to the input", "a hard link to the input")
REFUSED = {
    "directory": "is a directory",
    "missing folder": "does not exist; create it first",
    "read-only folder": "cannot be written: Permission denied",
    "link of another user": "is a link of another user",
}


def foresee(writer: Writer, kind: str) -> tuple[int, str]:
    """Return the exit code of a writer and what it says."""
    if kind in SAME and writer.has_input:
        return exits.BAD_INPUT, "is the file that is read"
    if kind in REFUSED:
        return exits.BAD_INPUT, REFUSED[kind]
    if kind in STREAMS and writer.read is read_npy:
        return exits.BAD_INPUT, "npy cannot be written to"
    if kind == "full device":
        return exits.DISK_FULL, "vectormill: The disk is full: /dev/full could not be written completely."
    if kind == "closed stdout":
        return exits.OUTPUT_CLOSED, "vectormill: /dev/stdout was closed before everything was written."
    return writer.code, ""


Target = tuple[Path, Callable[[], bytes]]


def make_target(kind: str, folder: Path) -> Target:
    """Make a file or what is none; return its name for a command, and a function that reads what was written there."""
    out, target = folder / "out", folder / "folder" / "target"
    if kind in SAME:
        target = folder / "in.jsonl"
        if kind == "the input":
            return target, target.read_bytes
        (out.hardlink_to if "hard" in kind else out.symlink_to)(target)
    elif kind in REFUSED and "link" not in kind:
        name = {"directory": "folder", "missing folder": "missing/out", "read-only folder": "/sys/out"}[kind]
        return folder / name, target.read_bytes
    elif "link" in kind:
        out.symlink_to("between" if kind == "link to a link" else "folder/target")
        (folder / "between").symlink_to(target)
        if kind == "link of another user":
            os.chown(out, NOBODY, NOBODY, follow_symlinks=False)
    if kind in ("existing", "link", "link to a link", "link of another user"):
        out.write_bytes(BEFORE)
        out.chmod(0o640)
    return out, out.read_bytes


@contextmanager
def make_stream(kind: str, folder: Path) -> Iterator[Target]:
    """Make a pipe, or put one in place of stdout while the block runs."""
    out, log = folder / "out", folder / "log"
    if kind == "pipe":
        os.mkfifo(out)
        reading = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        writing = os.dup(1)
    else:
        reading, writing = os.pipe2(os.O_NONBLOCK)
        out = Path("/dev/full" if kind == "full device" else "/dev/stdout")
    if "appends" in kind:
        log.write_bytes(BEFORE)
        os.close(writing)
        writing = os.open(log, os.O_WRONLY | os.O_APPEND)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 20)
    if kind == "closed stdout":
        os.close(reading)
    with standing_for(1, writing):
        yield (
            out,
            lambda: log.read_bytes().removeprefix(BEFORE) if "appends" in kind else os.read(reading, 1 << 20),
        )
    if kind != "closed stdout":
        os.close(reading)


@contextmanager
def standing_for(number: int, descriptor: int) -> Iterator[None]:
    """Let a descriptor be stdin or stdout while the block runs."""
    kept = os.dup(number)
    os.dup2(descriptor, number)
    os.close(descriptor)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, writer in WRITERS.items()
        for kind in (*FILES, *STREAMS, *REFUSED, *(SAME if writer.has_input else ()))
    ],
)
def test_every_command_writes_whole_files_follows_links_and_refuses_what_it_cannot_write(
    name: str, kind: str, say: Say, tmp_path: Path
) -> None:
    if kind == "link of another user" and os.geteuid() != 0:
        # Another owner is given to a file by chown, which the system allows to root alone.
        pytest.skip("only root can make another user's link")
    writer = WRITERS[name]
    code, sentence = foresee(writer, kind)
    (tmp_path / "plain").touch()
    plain = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    make = make_stream if kind in STREAMS else lambda *given: nullcontext(make_target(*given))
    with make(kind, tmp_path) as (out, read):
        is_link, is_file = out.is_symlink(), kind in (*FILES, *SAME)
        before = out.read_bytes() if is_file and out.exists() else None
        mode = plain if before is None else stat.S_IMODE(out.stat().st_mode)
        ended, said = say(name, out)
        assert ended == code, said
        assert sentence in said
        if code == writer.code:
            assert writer.read(read()) == list(writer.content)
        if kind not in STREAMS:
            assert out.is_symlink() == is_link
        if is_file and code == writer.code:
            assert stat.S_IMODE(out.stat().st_mode) == (0o600 if writer.is_private else mode)
        elif is_file:
            assert (out.read_bytes(), stat.S_IMODE(out.stat().st_mode)) == (before, mode)
        assert kind != "pipe" or out.is_fifo()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert files <= {
        "in.jsonl", "plain", "folder", "folder/target", "out", "out.keys.txt", "between", "elsewhere.jsonl",
        "in.jsonl.keys.txt", "log",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("IN -o out.jsonl --errors out.jsonl", "are the same file"),
        ("IN -o out.jsonl --errors ./folder/../out.jsonl", "are the same file"),
        ("IN -o out.jsonl --errors dangling.jsonl", "are the same file"),
        ("IN -o kept.jsonl --errors hard.jsonl", "are the same file"),
        ("IN -o out.npy --errors out.npy.keys.txt", "are the same file"),
        ("IN -o out.npy --errors keys.jsonl", "are the same file"),
        ("IN -o out.npy --errors in.jsonl", "is the file that is read"),
        ("folder -o folder/out.jsonl", "lies in the folder that is read"),
        ("folder -o inside/out.jsonl", "lies in the folder that is read"),
        ("inside -o folder/deep.jsonl", "lies in the folder that is read"),
        ("- -o in.jsonl", "is the file that is read"),
    ],
)
def test_two_arguments_that_are_one_file_are_refused_before_anything_is_read(
    words: str, sentence: str, say: Say, url: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("folder", "text.txt").write_text("a text")
    Path("inside").symlink_to("folder")
    Path("dangling.jsonl").symlink_to("out.jsonl")
    Path("keys.jsonl").symlink_to("out.npy.keys.txt")
    Path("kept.jsonl").write_bytes(BEFORE)
    Path("hard.jsonl").hardlink_to("kept.jsonl")
    with Path("in.jsonl").open() as standard_input, standing_for(0, os.dup(standard_input.fileno())):
        assert run("encode", *words.replace("IN", "in.jsonl").split()) == exits.BAD_INPUT
    assert sentence in capfd.readouterr().err
    assert (Path("in.jsonl").read_text(), Path("kept.jsonl").read_bytes()) == (LINES, BEFORE)
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("schema", ["schema.jsonl", "link.jsonl"])
def test_a_schema_is_not_overwritten(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINES)
    Path("schema.jsonl").write_text('{"person": null}')
    Path("link.jsonl").symlink_to("schema.jsonl")
    assert run("extract", "in.jsonl", "--schema", schema, "-o", "schema.jsonl") == exits.BAD_INPUT
    assert "is the file that is read" in capsys.readouterr().err
    assert Path("schema.jsonl").read_text() == '{"person": null}'


# Each row is something that a shell does to stdout, with the exit code of every command that writes there.
ENDINGS = {
    "closed pipe": (
        exits.OUTPUT_CLOSED,
        "vectormill: /dev/stdout was closed before everything was written.\n",
    ),
    "closed": (exits.OUTPUT_CLOSED, "vectormill: /dev/stdout was closed before everything was written.\n"),
    "full disk": (
        exits.DISK_FULL,
        "vectormill: The disk is full: /dev/stdout could not be written completely.\n",
    ),
    "ascii": (exits.SUCCESS, ""),
}
PRINTING = {
    "help": ("--help",),
    "table": ("errors", "JOB"),
    "json": ("errors", "JOB", "--json"),
    "export": ("export", "JOB", "-o", "-"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("printed", PRINTING)
def test_every_command_ends_alike_when_stdout_takes_nothing_or_only_ascii(
    printed: str, ending: str, job: str, url: str
) -> None:
    environment = {**os.environ, "VECTORMILL_API_URL": url, "PYTHONPATH": str(ROOT)}
    if ending == "ascii":
        environment |= {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    reading, writing = os.pipe()
    with open(reading, "rb") as shown:  # noqa: PTH123 - a descriptor
        if ending == "closed pipe":
            shown.close()
        if ending == "full disk":
            os.dup2(os.open("/dev/full", os.O_WRONLY), writing)
        command = [
            sys.executable,
            "-m",
            "vectormill.cli",
            *(word.replace("JOB", job) for word in PRINTING[printed]),
        ]
        if ending == "closed":
            command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        ended = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=60)
        os.close(writing)
        assert (ended.returncode, ended.stderr.decode()) == ENDINGS[ending]
        if ending == "ascii" and printed != "help":
            assert ("ä" if printed == "export" else "ü") in shown.read().decode(), (
                "it is UTF-8 in every locale"
            )


@pytest.mark.parametrize("words", [("jobs",), ("status", "JOB", "--watch"), ("export", "JOB", "-o", "-")])
def test_every_command_that_is_interrupted_ends_alike(
    words: tuple[str, ...],
    job: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("httpx.Client.send", interrupt)
    assert run(*(word.replace("JOB", job) for word in words), "--api-url", url) == exits.INTERRUPTED
    assert capfd.readouterr() == ("", "vectormill: Interrupted.\n")
