"""What is said of packages that are missing: by the command, else by who needs them; and what --version tells."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.architecture.sources import ROOT
from vectormill import extras
from vectormill.domain.errors import ConfigurationError
from vectormill.extras import compose_install

ASKED = [
    "httpx<0.29,>=0.28",
    "celery<5.8,>=5.7; extra == 'queue'",
    'psycopg[binary]<4,>=3.3; extra == "queue"',
    "fastapi<0.166; extra == 'server'",
    "pyroute2<0.10; sys_platform == 'linux' and extra == 'dev'",
    "nvidia-ml-py<14,>=13; extra == 'worker'",
    "pyarrow<27,>=26; extra == 'server'",
    "pyarrow<27,>=26; extra == 'dataframes'",
    "torch==2.13.0; extra == 'worker'",
]


@pytest.mark.parametrize(
    ("package", "command", "advice"),
    [
        ("celery", "worker", "[worker]'"),  # whatever it is that was not found first
        ("celery", "api", "[server]'"),
        ("celery", "submit", "[all]'"),  # nobody asks for the extra that others share
        ("psycopg", None, "[all]'"),
        ("pyarrow", "encode", "[dataframes]'"),  # a client needs no server
        ("starlette", None, "[server]'"),  # of another name than its distribution
        ("pynvml", None, "[worker]'"),
        ("httpx", None, "[all]'"),  # always needed: a broken installation
        ("pymysql", "sources", "pip install pymysql"),  # a driver of the user's own choice
        ("pyroute2", None, "pip install pyroute2"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_of_the_role(
    package: str, command: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: ASKED)
    assert advice in extras.describe_missing_package(package, command)


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        (None, "pip install 'vectormill[all]'"),  # from an index
        ({"url": "WHEEL", "archive_info": {}}, "pip install 'vectormill[all] @ WHEEL'"),
        (
            {"url": "file:///gone/vectormill-0.1.0-py3-none-any.whl"},
            "pip install 'vectormill-0.1.0-py3-none-any.whl[all]'",
        ),
        (
            {"url": "https://host/a.whl", "archive_info": {}},
            "pip install 'vectormill[all] @ https://host/a.whl'",
        ),
        (
            {"url": "https://host/mill", "vcs_info": {"vcs": "git", "commit_id": "57ad"}},
            "pip install 'vectormill[all] @ git+https://host/mill@57ad'",
        ),
        ({"url": "file:///my%20mill", "dir_info": {"editable": True}}, "pip install -e '/my mill[all]'"),
        ({"url": "file:///mill", "dir_info": {}}, "pip install '/mill[all]'"),
    ],
)
def test_the_command_that_installs_an_extra_names_what_was_installed(
    recorded: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.whl").touch()
    text = None if recorded is None else json.dumps(recorded).replace("WHEEL", (tmp_path / "a.whl").as_uri())
    monkeypatch.setattr(
        "vectormill.extras.distribution", lambda name: SimpleNamespace(read_text=lambda file: text)
    )
    assert compose_install("all") == command.replace("WHEEL", (tmp_path / "a.whl").as_uri())
    monkeypatch.setattr("vectormill.extras.find_spec", lambda name: None)
    assert compose_install("all").startswith("uv pip install")


def test_a_checkout_that_is_not_installed_is_what_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("vectormill.extras.distribution", find)
    assert compose_install("all") == f"pip install -e '{ROOT}[all]'"


def test_a_service_on_this_machine_is_refused_with_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"fastapi", "torch"}
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if name in there else None)
    with pytest.raises(ConfigurationError, match=r"\(flower, embedded\).*\[all\]'"):
        extras.require_service(is_embedded=True)
    with pytest.raises(ConfigurationError, match=r"\(flower\)"):
        extras.require_service(is_embedded=False)
    there.add("flower")
    extras.require_service(is_embedded=False)
