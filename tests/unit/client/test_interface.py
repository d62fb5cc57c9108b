"""What users import from `vectormill`: all that they call, catch and annotate with."""

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import vectormill
from tests.architecture.sources import ROOT
from vectormill import AsyncClient, AsyncResults, Client, Results, VectormillError

USE = """
import vectormill
from vectormill import ApiError, Client, JobBody, read_table


def wait(client: Client, job_id: str) -> JobBody | None:
    try:
        return client.wait(job_id, timeout_seconds=5)
    except vectormill.WaitTimeout:
        return None
    except ApiError as error:
        raise SystemExit(error.status) from error
"""


def find_calls() -> Iterator[typing.Any]:
    """Yield every function that users call."""
    kinds = (Client, AsyncClient, Results, AsyncResults)
    parents = {parent for kind in kinds for parent in kind.__mro__ if parent.__name__.endswith("Calls")}
    for kind in {*kinds, *parents}:
        yield from (call for name, call in vars(kind).items() if name[0] != "_" and callable(call))
    yield from (vectormill.read_batches, vectormill.read_manifest, vectormill.read_table)


def find_types(annotation: object) -> Iterator[type]:
    """Yield our classes in an annotation, however deep."""
    for part in (annotation, typing.get_origin(annotation)):
        if isinstance(part, type) and part.__module__.startswith("vectormill"):
            yield part
    for part in typing.get_args(annotation):
        yield from find_types(part)


def find_errors(kind: type[Exception] = VectormillError) -> Iterator[type[Exception]]:
    for error in kind.__subclasses__():
        yield error
        yield from find_errors(error)


def test_whatever_a_call_takes_gives_or_raises_is_imported_from_vectormill() -> None:
    calls = list(find_calls())
    assert len(calls) > 100
    kinds = {
        kind for call in calls for each in inspect.get_annotations(call).values() for kind in find_types(each)
    }
    named = {word for call in calls for word in re.findall(r"\b[A-Z]\w+", call.__doc__ or "")}
    kinds |= {error for error in find_errors() if error.__name__ in named}
    missing = {kind.__name__ for kind in kinds if getattr(vectormill, kind.__name__, None) is not kind}
    assert missing == set(), "add it to vectormill/interface.py"


def test_the_names_are_listed_and_no_others_are_there() -> None:
    names: list[str] = vectormill.__all__  # type: ignore[attr-defined]
    assert {"ApiError", "AsyncClient", "Client", "JobBody", "WaitTimeout", "read_table"} <= set(names)
    assert {*names, "__version__"} <= set(dir(vectormill))
    assert not [name for name in names if not hasattr(vectormill, name)]
    with pytest.raises(ImportError, match="cannot import name 'Nope'"):
        exec("from vectormill import Nope")
    scope: dict[str, object] = {}
    exec("from vectormill import *", scope)
    assert set(names) <= set(scope)


def test_a_type_checker_accepts_these_names_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(USE)
    (tmp_path / "bad.py").write_text(
        "import vectormill\nfrom vectormill import Nope\nfrom vectormill.integrations import Never\nvectormill.other\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--config-file=",
            "good.py",
            "bad.py",
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    places = {line.partition(": ")[0] for line in done.stdout.splitlines() if ": error:" in line}
    assert places == {"bad.py:2", "bad.py:3", "bad.py:4"}, done.stdout + done.stderr
