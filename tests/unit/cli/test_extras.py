"""What is said of packages that are missing: by the command, else by who needs them; and what --version tells."""

import pytest

from vectormill.cli import extras
from vectormill.cli.doctor import describe_installation
from vectormill.domain.errors import ConfigurationError

ASKED = [
    "httpx<0.29,>=0.28",
    "celery<5.8,>=5.7; extra == 'queue'",
    'psycopg[binary]<4,>=3.3; extra == "queue"',
    "fastapi<0.166; extra == 'server'",
    "pyroute2<0.10; sys_platform == 'linux' and extra == 'dev'",
    "nvidia-ml-py<14,>=13; extra == 'worker'",
    "torch==2.13.0; extra == 'worker'",
]


@pytest.mark.parametrize(
    ("package", "command", "advice"),
    [
        ("celery", "worker", "vectormill[worker]"),  # whatever it is that was not found first
        ("celery", "api", "vectormill[server]"),
        ("celery", "submit", "vectormill[all]"),  # nobody asks for the extra that others share
        ("psycopg", None, "vectormill[all]"),
        ("starlette", None, "vectormill[server]"),  # of another name than its distribution
        ("pynvml", None, "vectormill[worker]"),
        ("httpx", None, "vectormill[all]"),  # always needed: a broken installation
        ("pymysql", "sources", "pip install pymysql"),  # a driver of the user's own choice
        ("pyroute2", None, "pip install pyroute2"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_of_the_role(
    package: str, command: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: ASKED)
    assert advice in extras.describe_missing(package, command)


def test_a_service_on_this_machine_is_refused_with_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"fastapi", "torch"}
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if name in there else None)
    with pytest.raises(ConfigurationError, match=r"\(flower, embedded\).*vectormill\[all\]"):
        extras.require_service(is_embedded=True)
    with pytest.raises(ConfigurationError, match=r"\(flower\)"):
        extras.require_service(is_embedded=False)
    there.add("flower")
    extras.require_service(is_embedded=False)


def test_the_version_tells_the_schema_the_processor_and_the_parts() -> None:
    names = [line.split()[0] for line in describe_installation()]
    assert names == [
        "vectormill", "schema", "python", "processor", "torch", "openvino", "transformers", "postgres", "valkey",
    ]  # fmt: skip
