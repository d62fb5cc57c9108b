import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer import Context
from typer.main import get_command

from tests.architecture.sources import ROOT
from tests.commands import run
from vectormill.cli import exits
from vectormill.cli.app import GROUPS, app
from vectormill.cli.files import read_input
from vectormill.domain.errors import InvalidItem, UnknownModel
from vectormill.problems import ApiError, ApiFailure, ApiUnreachable
from vectormill.processes.lifetimes import free_port

COMMANDS: Final = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VECTORMILL_API_URL", raising=False)
    monkeypatch.delenv("VECTORMILL_LOG_LEVEL", raising=False)


def test_the_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert run(command, "--help") == 0
        help = capsys.readouterr().out
        assert "Example" in help
        assert f"vectormill {command}" in help.partition("Example")[2]


def test_every_command_is_in_one_group_of_the_help() -> None:
    assert sorted(" ".join(GROUPS.values()).split()) == COMMANDS


@pytest.mark.parametrize("command", [("migrate",), ("restore", __file__), ("keys", "list")])
def test_a_postgres_that_refuses_the_connection_is_told_in_a_sentence(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_DATABASE_URL", f"postgresql://nobody:secret@127.0.0.1:{free_port()}/x")
    assert run(*command) == exits.UNAVAILABLE
    said = capsys.readouterr().err
    assert "Postgres cannot be used: connection failed" in said
    assert "Check VECTORMILL_DATABASE_URL" in said
    assert "secret" not in said


def list_options(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield the options that may be repeated, of a command and those below it, each with its full name."""
    for name, each in getattr(command, "commands", {}).items():
        yield from list_options(each, *names, name)
    for parameter in command.params:
        if getattr(parameter, "multiple", False):
            yield " ".join((*names, parameter.opts[0])), parameter


def test_options_that_take_several_names_take_them_repeated_and_separated_by_commas() -> None:
    # A comma may be part of these, as of the folder of a model.
    patterns = {"search --filter", *(f"sources set --{each}" for each in ("files", "include", "exclude"))}
    patterns |= {f"{command} --model" for command in ("plan", "up", "worker")}
    found = dict(list_options(get_command(app)))
    assert patterns < set(found)
    for name, option in found.items():
        read = option.process_value(Context(get_command(app)), ["a, b", "c"])
        assert list(read) == (["a, b", "c"] if name in patterns else ["a", "b", "c"]), name
        assert ("commas" in option.help) == (name not in patterns), name


def test_the_help_of_a_command_loads_nothing_that_it_needs_only_to_run() -> None:
    program = (
        "import sys\n"
        "from vectormill.cli import main\n"
        "try:\n    main(['encode', '--help'])\n"
        "except SystemExit:\n    print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    # pydantic is there: Typer itself converts the values of options with it.
    assert not loaded & {"rich", "httpx", "numpy", "pyarrow", "msgspec", "psutil", "sqlalchemy", "celery"}


def write_hostile_module(path: Path, mark: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open({str(mark)!r}, 'a').write({path.stem!r})\nraise RuntimeError('mine')\n")


def test_no_child_of_a_command_imports_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("json", "logging", "multiprocessing", "pickle", "signal", "vectormill"):
        write_hostile_module(tmp_path / "project" / f"{name}.py", tmp_path / "imported")
    program = tmp_path / "program.py"  # in another folder, as the console script is
    program.write_text("""
import subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from vectormill.cli import main

if __name__ == "__main__":
    sys.argv[1:] = ["--help"]
    try:
        main()
    except SystemExit:
        subprocess.run([sys.executable, "-c", "import json, vectormill"], check=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            assert pool.submit(abs, -1).result() == 1
""")
    subprocess.run([sys.executable, program], cwd=tmp_path / "project", timeout=60, check=True)
    assert not (tmp_path / "imported").exists()


def test_code_that_hides_a_package_of_ours_is_named_and_not_run(tmp_path: Path) -> None:
    write_hostile_module(tmp_path / "project" / "worker.py", tmp_path / "imported")
    done = subprocess.run(
        [sys.executable, "-m", "vectormill.cli", "worker"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "project")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == exits.BAD_INPUT
    assert f"{tmp_path / 'project' / 'worker.py'} hides" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert not (tmp_path / "imported").exists()


def test_an_error_is_one_sentence_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run("jobs", "--api-url", url) == exits.UNAVAILABLE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert url in shown.err


def test_debug_shows_the_traceback_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--debug", "jobs", "--api-url", f"http://127.0.0.1:{free_port()}") == exits.UNAVAILABLE
    assert "Traceback" in capsys.readouterr().err


def test_a_misspelt_setting_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_DATABSE_URL", "x")
    assert run("scheduler") == exits.BAD_INPUT
    assert "did you mean VECTORMILL_DATABASE_URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (
            ("encode", "a", "-o", "b", "--vector-type", "halfvec"),
            {},
            "'--vector-type': 'halfvec' is not one of",
        ),
        (("scheduler",), {"VECTORMILL_REDIS_URL": "http://a"}, "VECTORMILL_REDIS_URL: not a Redis URL"),
        (
            ("scheduler",),
            {"VECTORMILL_HEARTBEAT_SECONDS": "60"},
            "vectormill: VECTORMILL_HEARTBEAT_SECONDS (60) must",
        ),
        (("plan",), {"VECTORMILL_WORKER_BACKEND": "half"}, "VECTORMILL_WORKER_BACKEND: must be one of"),
        (
            ("plan",),
            {"VECTORMILL_WORKER_MEMORY_LOW_WATERMARK": "1", "VECTORMILL_WORKER_MEMORY_HIGH_WATERMARK": "0.5"},
            "vectormill: VECTORMILL_WORKER_MEMORY_LOW_WATERMARK (1) must",
        ),
    ],
)
def test_a_refused_value_is_named_without_the_words_of_a_library(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(*arguments) == exits.BAD_INPUT
    assert sentence in capsys.readouterr().err


def test_every_error_has_a_code_and_a_sentence() -> None:
    for error, code, words in [
        (InvalidItem("in.jsonl, line 3: no."), exits.BAD_INPUT, "in.jsonl, line 3: no."),
        (UnknownModel(), exits.BAD_INPUT, "not registered"),
        (ApiError(422, "Refused", "Bad priority."), exits.BAD_INPUT, "Bad priority."),
        (ApiFailure(503, "Away"), exits.UNAVAILABLE, "HTTP 503"),
        (ApiUnreachable("No API."), exits.UNAVAILABLE, "No API."),
        (exits.CommandFailed("Job x failed.", 4), 4, "Job x failed."),
        (
            PermissionError(13, "Permission denied", "/root/out"),
            exits.BAD_INPUT,
            "/root/out: Permission denied.",
        ),
        (ModuleNotFoundError("no", name="torch.nn"), exits.BAD_INPUT, "[worker]'."),
        (
            ModuleNotFoundError("no", name="vectormill.x"),
            exits.BUG,
            "unexpectedly (ModuleNotFoundError: no)",
        ),
        (KeyError("x"), exits.BUG, "unexpectedly (KeyError: 'x')"),
        (KeyboardInterrupt(), exits.INTERRUPTED, ""),
    ]:
        assert exits.exit_code_of(error) == code
        assert words in exits.describe(error)


def test_a_second_text_goes_along_whatever_its_field_is_called(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"key": "a", "text": "x", "text_pair": "y", "answer": "z"}\n{"key": "b", "text": "w"}'
    )
    for field, pairs in (("text_pair", ["y", None]), ("answer", ["z", None]), (None, [None, None])):
        items = read_input(str(tmp_path / "in.jsonl"), None, "text", field, strict=True)
        assert [item.get("text_pair") for item in items] == pairs


SCHEMA = '{"person": null}'


@pytest.mark.parametrize(
    ("schema", "more", "said"),
    [
        (SCHEMA, ["--format", "parquet", "--show", "1"], "--show reads"),
        ('{"a": null, "a": null}', [], "schema.a: duplicate type"),
        ("[" * 100_000, [], "at most 8 levels"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: str, more: list[str], said: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"key": "a", "text": "b"}\n')
    (tmp_path / "schema.json").write_text(schema)
    files = [str(tmp_path / "in.jsonl"), "--schema", str(tmp_path / "schema.json")]
    out = tmp_path / "OUT.JSONL"
    assert run("extract", *files, "-o", str(out), "--api-url", "http://127.0.0.1:9", *more) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
