"""Every operation, with a key of every scope: what the table of docs/SECURE.md says is what the API answers."""

import re
from pathlib import Path

import yaml
from sqlalchemy import Engine

from api.door.scopes import OPERATIONS
from tests.api_server import api_client
from tests.architecture.sources import ROOT
from tests.database import ask
from vectormill.keys.api_key import OPENS, make_secret
from vectormill.keys.api_keys import create_key
from vectormill.settings import Settings

ALL = OPERATIONS
PAGE = (ROOT / "docs/SECURE.md").read_text(encoding="utf-8").partition("## Who can do what")[2]


def test_each_stranger_has_a_row_which_names_the_module_of_what_they_try() -> None:
    rows = dict(re.findall(r"^\| ([a-z]) \|(.*)\|$", PAGE, re.MULTILINE))
    assert "".join(rows) == "abcdefg"
    named = set(re.findall(r"`(test_\w+\.py)`", " ".join(rows.values())))
    assert {file.name for file in Path(__file__).parent.glob("test_*.py")} <= named


def test_whoever_listens_to_others_is_named_with_its_port() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    (sentence,) = re.findall(r"^Listening to others .*$", PAGE, re.MULTILINE)
    for name in (name for name, service in compose.items() if "ports" in service):
        assert name in sentence.lower()
    assert f"API ({Settings().api_port})" in sentence
    assert f"Flower ({Settings().flower_port}," in sentence


def test_a_key_may_what_its_scope_includes_and_nothing_else(engine: Engine) -> None:
    secrets = {scope: make_secret() for scope in OPENS}
    for scope, secret in secrets.items():
        ask(engine, create_key, scope, secret, scope)
    with api_client(engine) as client:
        for each in ALL:
            path = re.sub(r"{[^}]*}", "1", each.path)
            if each.method == "GET" and path.endswith("/events"):
                continue  # it has no end
            for scope, included in OPENS.items():
                header = {"Authorization": f"Bearer {secrets[scope]}", "Content-Type": "application/json"}
                with client.stream(each.method, path, headers=header, content=b"no json") as answer:
                    is_refused = answer.status_code in (401, 403)
                assert is_refused == (each.scope is not None and each.scope not in included), (scope, each)
            with client.stream(each.method, path, content=b"no json") as answer:
                assert (answer.status_code == 401) == (each.scope is not None), each


def test_a_key_has_results_written_below_the_named_prefixes_alone(engine: Engine) -> None:
    refused = ("s3://other/x", "s3://bucket", "s3://bucket/results-2/x", "s3://bucket/other", "gs://bucket/results/x",
               "iceberg://lake/other.table", "iceberg://lake/papers2.table")  # fmt: skip
    allowed = ("s3://bucket/results", "s3://bucket/results/x/y", "iceberg://lake/papers.table")
    sources, admin = make_secret(), make_secret()
    for scope, secret in (("sources", sources), ("admin", admin)):
        ask(engine, create_key, scope, secret, scope)
    # The collection is refused beside an output, but later than a key that may not write there.
    body = {"items": [], "collection": "docs"}
    with api_client(engine, output_prefixes="s3://bucket/results/, iceberg://lake/papers") as client:
        for secret, urls, is_refused in (
            (sources, refused, True),
            (sources, allowed, False),
            (admin, refused, False),
        ):
            header = {"Authorization": f"Bearer {secret}"}
            for url in urls:
                lines = {"params": {"to": url, "collection": "docs"}, "content": b""}
                ndjson = header | {"Content-Type": "application/x-ndjson"}
                for answer in (
                    client.post("/v1/jobs", json=body | {"to": url}, headers=header),
                    client.post("/v1/jobs", **lines, headers=ndjson),  # type: ignore[arg-type]
                ):
                    assert (answer.status_code == 403) == is_refused, (url, answer.text)
                    assert not is_refused or "VECTORMILL_OUTPUT_PREFIXES" in answer.json()["detail"]
    assert Settings().output_prefixes == "", "without the setting such a key writes into no bucket"
