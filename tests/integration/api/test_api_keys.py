"""The door of the API: keys, their scopes and their end, names of hosts, and pages of others."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event

from api.app import create_app
from api.door.scopes import OPERATIONS, RULES, find_scope
from tests.api_server import ITEMS, SMALL, api_client, assert_problem
from tests.database import execute
from vectormill.client import Client
from vectormill.db.session import make_engine
from vectormill.domain.errors import Conflict
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key, list_keys, revoke_key
from vectormill.problems import ApiError
from vectormill.settings import Settings

JOB = {"items": ITEMS, "options": SMALL}
UNKNOWN = "00000000-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def _no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)  # every request sees the keys as they are


def add_key(
    engine: Engine, name: str, scope: str = "write", lifetime: timedelta | None = None
) -> dict[str, str]:
    """A new key as a header."""
    secret = make_secret()
    with engine.begin() as connection:
        create_key(connection, name, secret, scope, lifetime)
    return {"Authorization": f"Bearer {secret}"}


def revoke(engine: Engine, name: str) -> None:
    with engine.begin() as connection:
        revoke_key(connection, name)


def test_an_idempotency_key_belongs_to_the_api_key_that_brought_it(
    client: httpx.Client, engine: Engine
) -> None:
    repeated = {"Idempotency-Key": "nightly"}
    before = client.post("/v1/jobs", json=JOB, headers=repeated | {"Idempotency-Key": "of-old"}).json()["id"]
    ours, theirs = add_key(engine, "ours"), add_key(engine, "theirs")

    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}
    form = {"files": {"file": ("a.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file_id = client.post("/v1/files", **form, headers=ours).json()["id"]  # type: ignore[arg-type]
    batch = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    for path, body in (("/v1/jobs", JOB), ("/v1/batches", batch)):
        first, again, other = (
            client.post(path, json=body, headers=repeated | key).json()["id"] for key in (ours, ours, theirs)
        )
        assert first == again
        assert other != first
    # A key that was kept before the first API key has no owner; repeating it must not make a second job.
    old = {"Idempotency-Key": "of-old"}
    assert client.post("/v1/jobs", json=JOB, headers=old | ours).json()["id"] == before
    execute(engine, "UPDATE vectormill.jobs SET created_at = now() - interval '25 hours'")
    assert client.post("/v1/jobs", json=JOB, headers=old | theirs).json()["id"] != before


def test_once_a_key_exists_everything_but_the_probes_wants_one(client: httpx.Client, engine: Engine) -> None:
    add_key(engine, "first")
    for path in (
        "/v1/jobs",
        "/v1/models",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/nothing",
        f"/v1/jobs/{UNKNOWN}",
    ):
        answer = client.get(path)
        assert_problem(answer, 401, "key-missing", "VECTORMILL_API_KEY", "vectormill keys create")
        assert answer.headers["www-authenticate"] == 'Bearer realm="vectormill"'
    assert_problem(client.post("/v1/jobs", json=JOB), 401, "key-missing")
    assert client.get("/livez").status_code == client.get("/readyz").status_code == 200


def test_a_key_opens_what_its_scope_says_and_names_the_one_that_is_missing(
    client: httpx.Client, engine: Engine
) -> None:
    read, write, admin = (add_key(engine, scope, scope) for scope in ("read", "write", "admin"))
    assert client.get("/v1/jobs", headers=read).status_code == 200
    assert client.get("/metrics", headers=read).status_code == 200
    search = client.post("/v1/collections/docs/search", json={"text": "x"}, headers=read)
    assert_problem(search, 404, "collection-not-found")
    refused = client.post("/v1/jobs", json=JOB, headers=read)
    assert_problem(refused, 403, "scope-missing", "a key with scope write", "the key read has scope read")
    assert 'error="insufficient_scope", scope="write"' in refused.headers["www-authenticate"]
    for header in (write, admin):
        assert client.post("/v1/jobs", json=JOB, headers=header).status_code == 202
    assert_problem(client.put("/v1/jobs", headers=write), 403, "scope-missing", "scope admin")
    assert client.put("/v1/jobs", headers=admin).status_code == 405


def test_who_may_submit_jobs_has_the_server_read_and_post_nowhere(
    client: httpx.Client, engine: Engine
) -> None:
    write, sources, webhooks = (add_key(engine, scope, scope) for scope in ("write", "sources", "webhooks"))
    hook = {"url": "https://example.com/hook", "events": ["job.failed"]}
    source = {"kind": "nothing"}

    def ask(header: dict[str, str]) -> tuple[httpx.Response, httpx.Response]:
        return (
            client.put("/v1/collections/docs/source", json=source, headers=header),
            client.post("/v1/webhooks", json=hook, headers=header),
        )

    for header, needed in (
        (write, ("sources", "webhooks")),
        (sources, (None, "webhooks")),
        (webhooks, ("sources", None)),
    ):
        for answer, scope in zip(ask(header), needed, strict=True):
            if scope is None:
                assert answer.status_code in (201, 422)
            else:
                assert_problem(answer, 403, "scope-missing", f"a key with scope {scope}")
        assert client.post("/v1/jobs", json=JOB, headers=header).status_code == 202


def test_what_is_no_key_opens_nothing(client: httpx.Client, engine: Engine) -> None:
    assert client.post("/v1/jobs", json=JOB).status_code == 202  # without any key the loopback needs none
    add_key(engine, "first")
    for header in ("Bearer vmk_wrong", "Bearer", "Basic dXNlcjpwYXNz", "vmk_wrong", "Bearer \xe4"):
        answer = client.get("/v1/jobs", headers=httpx.Headers({"Authorization": header}, encoding="latin-1"))
        assert_problem(answer, 401, "key-unknown" if header.startswith("Bearer ") else "key-missing")


def test_a_key_is_taken_from_the_headers_of_other_apis_clients_by_the_same_rules(
    client: httpx.Client, engine: Engine
) -> None:
    read = add_key(engine, "me", "read")["Authorization"].removeprefix("Bearer ")
    for name in ("api-key", "x-api-key", "X-API-Key"):
        assert client.get("/v1/jobs", headers={name: read}).status_code == 200
        assert_problem(client.post("/v1/jobs", json=JOB, headers={name: read}), 403, "scope-missing")
        assert_problem(client.get("/v1/jobs", headers={name: "vmk_wrong"}), 401, "key-unknown")
        assert_problem(client.get("/v1/jobs", headers={name: ""}), 401, "key-missing")
    # A proxy's own Authorization is no key.
    assert client.get("/v1/jobs", headers={"Authorization": "Basic eA==", "api-key": read}).status_code == 200


def test_a_request_with_two_different_keys_is_refused_whichever_opens(
    client: httpx.Client, engine: Engine
) -> None:
    read, admin = (
        add_key(engine, scope, scope)["Authorization"].removeprefix("Bearer ") for scope in ("read", "admin")
    )
    for headers in (
        [("Authorization", f"Bearer {read}"), ("api-key", admin)],
        [("api-key", admin), ("x-api-key", "vmk_wrong")],
        [("x-api-key", read), ("x-api-key", admin)],
        [("Authorization", f"Bearer {read}"), ("Authorization", f"Bearer {admin}")],
    ):
        refused = client.get("/v1/jobs", headers=headers)
        assert_problem(refused, 400, "keys-differ", "different keys")
        assert read not in refused.text
        assert admin not in refused.text
    same = {"Authorization": f"Bearer {read}", "api-key": read, "x-api-key": read}
    assert client.get("/v1/jobs", headers=same).status_code == 200


def test_a_page_of_another_site_changes_nothing_by_a_key_in_such_a_header(
    client: httpx.Client, engine: Engine
) -> None:
    write = add_key(engine, "me")["Authorization"].removeprefix("Bearer ")
    header = {"x-api-key": write, "Origin": "https://elsewhere.example"}
    assert_problem(client.post("/v1/jobs", json=JOB, headers=header), 403, "foreign-page")
    asked = {**header, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    assert "access-control-allow-origin" not in client.options("/v1/jobs", headers=asked).headers


def test_a_revoked_or_expired_key_opens_nothing_any_more(client: httpx.Client, engine: Engine) -> None:
    expired = add_key(engine, "old", lifetime=timedelta(seconds=-1))
    assert_problem(
        client.get("/v1/jobs"), 401, "key-missing"
    )  # a key that has run out does not open the loopback
    header = add_key(engine, "me")
    assert client.get("/v1/jobs", headers=header).status_code == 200
    revoke(engine, "me")
    assert_problem(client.get("/v1/jobs", headers=header), 401, "key-unknown", "revoked or expired")
    assert_problem(client.get("/v1/jobs", headers=expired), 401, "key-unknown")
    revoke(engine, "old")  # somebody's decision, unlike the passing of time
    assert client.get("/v1/jobs").status_code == 200


def test_an_api_that_others_reach_refuses_when_its_last_key_is_gone(engine: Engine) -> None:
    header = add_key(engine, "only")
    with api_client(engine, api_host="0.0.0.0", open_metrics=True) as client:
        assert client.get("/v1/jobs", headers=header).status_code == 200
        assert client.get("/metrics").status_code == 200  # which a setting opens, and nothing else
        assert client.get("/v1/jobs").status_code == 401
        revoke(engine, "only")
        assert_problem(client.get("/v1/jobs", headers=header), 403, "no-key-exists", "vectormill keys create")
        assert client.get("/livez").status_code == 200


def test_a_new_key_is_valid_at_once_beside_keys_that_were_read_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 3600.0)
    monkeypatch.setattr(api_keys, "UNKNOWN_SECONDS", 0.0)
    first = add_key(engine, "first")
    with api_client(engine) as client:
        assert client.get("/v1/jobs", headers=first).status_code == 200
        assert client.get("/v1/jobs", headers=add_key(engine, "second")).status_code == 200


def test_many_requests_read_the_keys_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESH_SECONDS", "UNKNOWN_SECONDS"):
        monkeypatch.setattr(api_keys, name, 3600.0)
    header, statements = add_key(engine, "me"), []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with api_client(engine) as client:
        for _ in range(5):
            assert client.get("/docs", headers=header).status_code == 200
            assert (
                client.get("/docs", headers={"Authorization": f"Bearer {make_secret()}"}).status_code == 401
            )
    assert sum("FROM vectormill.api_keys" in statement for statement in statements) == 1
    assert sum("SET last_used_at" in statement for statement in statements) == 1
    with engine.connect() as connection:
        (key,) = list_keys(connection)
    assert key.last_used_at is not None


def test_while_postgres_is_away_nobody_comes_in_and_the_process_lives() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    for host in ("127.0.0.1", "0.0.0.0"):
        with api_client(engine, api_host=host) as client:
            assert_problem(client.get("/v1/models"), 503, "database-unavailable")
            assert client.get("/livez").status_code == 200
            assert client.get("/metrics").status_code == (200 if host == "127.0.0.1" else 503)
    engine.dispose()


def test_there_are_no_more_keys_than_every_process_can_compare_and_no_secret_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.keys.api_keys.MAX_KEYS", 2)
    secret = add_key(engine, "first")["Authorization"].removeprefix("Bearer ")
    kept = execute(engine, "SELECT * FROM vectormill.api_keys").one()
    assert (secret[:4], len(secret), len(kept.hash)) == ("vmk_", 47, 32)
    assert secret not in str(tuple(kept))
    add_key(engine, "second", lifetime=timedelta(seconds=-1))
    with pytest.raises(Conflict, match="There are already 2 keys, the maximum; revoke"):
        add_key(engine, "third")
    revoke(engine, "first")
    add_key(engine, "third")


def test_the_python_client_brings_its_key_and_says_what_to_do_without(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_key(engine, "me")["Authorization"].removeprefix("Bearer ")
    url = str(client.base_url)
    many = ({"key": str(number), "text": "x" * 100_000} for number in range(300))
    with Client(url) as stranger:
        with pytest.raises(ApiError, match="VECTORMILL_API_KEY") as refused:
            stranger.models()
        assert refused.value.status == 401
        with pytest.raises(ApiError, match="VECTORMILL_API_KEY"):  # however large the upload is
            stranger.submit(many)
    with Client(url, api_key=key) as friend:
        assert friend.models()
    monkeypatch.setenv("VECTORMILL_API_KEY", f"{key}\n")
    with Client(url) as friend:
        assert friend.submit([{"key": "a", "text": "b"}])["state"] == "queued"


def test_the_api_says_which_scope_each_route_needs() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    schema = create_app(Settings(), engine).openapi()
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    said = {
        f"{method.upper()} {path}": operation["security"]
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    assert said["GET /livez"] == said["GET /readyz"] == []
    assert said["GET /v1/jobs"] == said["POST /v1/collections/{name}/search"] == [{"key": ["read"]}]
    assert said["POST /v1/jobs"] == said["POST /v1/jobs/{job_id}/cancel"] == [{"key": ["write"]}]
    unnamed = [name for name in said if not any(rule.fits(*name.split(" ", 1)) for rule in RULES)]
    assert not unnamed, "these routes stand in no row of RULES"
    of_their_own = len(RULES) - len(OPERATIONS)
    assert of_their_own == 4, (
        "a route names its scope in its operation's row; beside these there are pages alone"
    )


def test_the_scope_of_a_path_depends_on_no_trick_in_it() -> None:
    for key in ("a", "a/b", "a\nb", "a\n"):
        path = f"/v1/collections/docs/items/{key}"
        assert [find_scope(method, path) for method in ("GET", "PUT", "DELETE")] == ["read", "write", "write"]
    for path in ("/v1/collections/docs/", "/v1/webhooks/", "/v1/jobs/x/"):
        assert find_scope("DELETE", path) == find_scope("GET", path) == "read", path
    for path in ("/v1/webhooks\n", "/v1/jobs\n", "/livez\n"):
        assert find_scope("GET", path) == "admin", path
    assert find_scope("GET", "/v1/webhooks/a\nb") == "webhooks"
    # A route that nobody thought of.
    assert find_scope("POST", "/v1/anything") == find_scope("DELETE", "/v1/models/mini") == "admin"


def test_the_root_tells_without_a_key_where_things_are(engine: Engine) -> None:
    header = add_key(engine, "me", "read")
    with api_client(engine) as client:
        assert (client.head("/").status_code, client.head("/").content) == (200, b"")
        root = client.get("/").json()
        assert root.pop("name") == "Vectormill"
        for path in root.values():
            assert client.get(path, headers=header).status_code in (200, 303), path
        assert_problem(client.post("/", json={"inputs": "a"}), 401, "key-missing")


# ---- names and pages


def test_a_name_that_a_page_made_point_here_is_refused(client: httpx.Client) -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:1", "LOCALHOST", "127.8.8.8", "localhost."):
        assert client.get("/v1/jobs", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "192.0.2.7", "localhost.evil.example", "[::", ""):
        answer = client.get("/v1/jobs", headers={"Host": host})
        assert_problem(answer, 421, "unknown-host", "VECTORMILL_ALLOWED_HOSTS")
        assert client.get("/livez", headers={"Host": host}).status_code == 200


def test_names_of_the_settings_are_allowed_and_so_is_every_address_where_it_listens_on_all(
    engine: Engine,
) -> None:
    header = add_key(engine, "me")
    with api_client(engine, api_host="0.0.0.0", allowed_hosts="mill.example, api") as client:
        for host, status in (
            ("mill.example:8000", 200),
            ("api", 200),
            ("192.0.2.7:80", 200),
            ("evil.example", 421),
        ):
            assert client.get("/v1/jobs", headers={**header, "Host": host}).status_code == status, host
    with api_client(engine, allowed_hosts="*") as client:
        assert client.get("/v1/jobs", headers={**header, "Host": "evil.example"}).status_code == 200


def test_a_page_of_others_changes_nothing_even_without_a_body(client: httpx.Client) -> None:
    job = client.post("/v1/jobs", json=JOB).json()
    for origin in ("https://evil.example", "null", "http://192.0.2.7:8000"):
        answer = client.post(f"/v1/jobs/{job['id']}/cancel", headers={"Origin": origin})
        assert_problem(answer, 403, "foreign-page")
        seen = client.get(f"/v1/jobs/{job['id']}", headers={"Origin": origin})
        assert seen.json()["state"] == "queued"
        assert not any(name.startswith("access-control-") for name in seen.headers)
    own = {"Origin": str(client.base_url)}
    assert client.post(f"/v1/jobs/{job['id']}/cancel", headers=own).json()["state"] == "cancelled"


def test_a_body_says_what_it_is_as_no_form_of_a_page_can(client: httpx.Client) -> None:
    bodies: tuple[tuple[str, Any], ...] = (("/v1/jobs", JOB), ("/v1/collections/docs/search", {"text": "x"}))
    for path, body in bodies:
        for media_type in (None, "text/plain", "application/x-www-form-urlencoded"):
            headers = {} if media_type is None else {"Content-Type": media_type}
            answer = client.post(path, content=json.dumps(body).encode(), headers=headers)
            assert_problem(answer, 415, "unsupported-media-type", "application/json")
