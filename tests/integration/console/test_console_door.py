"""Who gets into the console, how far, and what a browser is told to do with its answers."""

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import Engine

from api.console.guard import HEADERS, SESSION_COOKIE, SESSION_SECONDS, open_session, seal_session
from api.console.routes import CONSOLE_ROUTERS
from api.door.hosts import parse_trusted_proxies
from tests.api_server import api_client, assert_problem
from tests.database import ask
from tests.protocol import make_items, submit
from vectormill.domain.errors import ConfigurationError
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key, load_keys, revoke_key

PAGE = {"Accept": "text/html"}
TOKEN = re.compile(r'"X-CSRF-Token": "([0-9a-f]{64})"')


@pytest.fixture(autouse=True)
def _fresh_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)


def add_key(engine: Engine, name: str, scope: str = "write") -> str:
    secret = make_secret()
    ask(engine, create_key, name, secret, scope)
    return secret


def log_in(client: httpx.Client, secret: str, **form: str) -> httpx.Response:
    page = client.get("/console/login")
    (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    return client.post("/console/login", data={"csrf": csrf, "key": secret, **form})


def find_token(page: httpx.Response) -> dict[str, str]:
    (token,) = TOKEN.findall(page.text)
    return {"X-CSRF-Token": token}


def list_console_paths() -> list[tuple[str, str]]:
    """Every route of the console, with something in the place of its parameters."""
    return [
        (method, re.sub(r"\{[^}]+\}", "x", route.path))
        for router in CONSOLE_ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.path != "/docs"
        for method in route.methods or ()
    ]


def test_without_any_key_the_loopback_looks_and_presses_without_a_login(client: httpx.Client) -> None:
    for method in ("GET", "HEAD"):
        assert client.request(method, "/", headers=PAGE).headers["location"] == "/console/jobs"
    assert client.get("/docs", headers=PAGE).headers["location"] == "/console/docs"
    assert client.get("/console/login").headers["location"] == "/console/jobs"
    page = client.get("/console/queue")
    assert page.status_code == 200
    assert "Log out" not in page.text
    assert find_token(page)


def test_once_a_key_exists_no_route_of_the_console_is_open_but_its_login_and_its_assets(
    client: httpx.Client, engine: Engine
) -> None:
    add_key(engine, "first")
    paths = list_console_paths()
    assert ("GET", "/console/live/queue") in paths
    for method, path in paths:
        if path == "/console/login" or path.startswith("/console/static/"):
            continue
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["location"][:14]) == (303, "/console/login"), path
        answer = client.request(method, path, headers={"HX-Request": "true"})
        assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/console/login"), path
        assert not answer.content


def test_a_login_leads_back_to_the_page_that_was_wanted_and_nowhere_else(
    client: httpx.Client, engine: Engine
) -> None:
    secret = add_key(engine, "me")
    wanted = client.get("/console/queue?x=1").headers["location"]
    assert wanted == "/console/login?next=%2Fconsole%2Fqueue%3Fx%3D1"
    assert log_in(client, secret, next="/console/queue?x=1").headers["location"] == "/console/queue?x=1"
    for foreign in ("https://evil.example/", "//evil.example", "/console/\\evil", "/v1/jobs", "javascript:x"):
        assert log_in(client, secret, next=foreign).headers["location"] == "/console/jobs"


def test_a_wrong_key_is_refused_in_words_and_leaves_no_session(client: httpx.Client, engine: Engine) -> None:
    add_key(engine, "first")
    answer = log_in(client, make_secret())
    assert answer.status_code == 401
    assert "mistyped, revoked or expired" in answer.text
    assert SESSION_COOKIE not in client.cookies
    assert client.post("/console/login", data={"csrf": "0" * 64, "key": "x"}).status_code == 403
    assert client.post("/console/login", data={"csrf": "é", "key": "x"}).status_code == 403
    assert client.post("/console/login", content=b"x" * 20_000).status_code == 413


def test_the_cookie_of_a_session_is_out_of_reach_and_opens_no_route_of_the_api(
    client: httpx.Client, engine: Engine
) -> None:
    secret = add_key(engine, "me")
    cookie = log_in(client, secret).headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    assert "Path=/console;" in cookie
    assert f"Max-Age={SESSION_SECONDS}" in cookie
    assert "Secure" not in cookie
    assert secret not in cookie
    value = client.cookies[SESSION_COOKIE]
    assert client.get("/console/queue").status_code == 200
    for path in ("/v1/jobs", "/metrics", "/docs", "/openapi.json"):
        answer = client.get(path, headers={"Cookie": f"{SESSION_COOKIE}={value}"})
        assert_problem(answer, 401, "key-missing")


def test_a_session_ends_with_its_key_and_with_a_logout(client: httpx.Client, engine: Engine) -> None:
    secret = add_key(engine, "me")
    add_key(engine, "other")
    log_in(client, secret)
    page = client.get("/console/queue")
    assert "me <small>write</small>" in page.text
    answer = client.post("/console/logout", headers=find_token(page))
    assert answer.headers["hx-redirect"] == "/console/login"
    assert client.get("/console/queue").status_code == 303
    log_in(client, secret)
    assert client.get("/console/queue").status_code == 200
    ask(engine, revoke_key, "me")
    assert client.get("/console/queue").status_code == 303


def test_a_stream_ends_when_the_key_of_its_session_is_revoked(client: httpx.Client, engine: Engine) -> None:
    add_key(engine, "another")
    log_in(client, add_key(engine, "me"))
    with client.stream("GET", "/console/live/queue") as stream:
        assert stream.status_code == 200
        parts = stream.iter_text()
        assert "retry" in next(parts)
        ask(engine, revoke_key, "me")
        assert "event: end" not in "".join(parts)  # the browser asks again, and is led to the login
    answer = client.get("/console/live/queue", headers={"HX-Request": "true"})
    assert answer.headers["hx-redirect"] == "/console/login"


def test_a_session_holds_at_every_process_and_is_noise_without_the_hash_of_its_key(engine: Engine) -> None:
    secret = add_key(engine, "me")
    other = add_key(engine, "other")
    now = time.time()
    keys = ask(engine, load_keys)
    key = next(key for key in keys if key.name == "me")
    cookie = seal_session(key, secret, now)
    assert cookie != seal_session(key, secret, now)
    assert open_session(keys, cookie, now) == key
    assert open_session(keys, cookie, now + SESSION_SECONDS + 1) is None
    assert open_session([each for each in keys if each.name == "other"], cookie, now) is None
    # Whoever knows the hash of a key and not the key makes no session of it.
    assert open_session(keys, seal_session(key, other, now), now) is None
    sealed = urlsafe_b64decode(cookie)
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        assert open_session(keys, urlsafe_b64encode(changed).decode(), now) is None, place
    for noise in ("", "x", "é", "A" * 40, "A" * 100_000, "=" * 8):
        assert open_session(keys, noise, now) is None


def test_nothing_is_pressed_without_the_token_of_the_own_page(client: httpx.Client, engine: Engine) -> None:
    job = submit(engine, make_items(2))
    path = f"/console/jobs/{job.id}/pause"
    page = client.get("/console/queue")
    for headers in ({}, {"X-CSRF-Token": "0" * 64}, {"X-CSRF-Token": ""}):
        answer = client.post(path, headers=headers)
        assert answer.status_code == 403
        assert "Reload the page" in answer.text
    foreign = {"Origin": "https://evil.example", **find_token(page)}
    assert_problem(client.post(path, headers=foreign), 403, "foreign-page")
    other = httpx.Client(base_url=client.base_url, trust_env=False)
    with other:
        assert find_token(other.get("/console/queue")) != find_token(page)
        assert other.post(path, headers=find_token(page)).status_code == 403


def test_every_answer_tells_the_browser_what_it_may_not_do(client: httpx.Client) -> None:
    css = re.findall(r'href="(/console/static/[^"]+console.css)"', client.get("/console/queue").text)[0]
    for path in ("/console/queue", "/console/nothing", "/console/openapi.json", css):
        answer = client.get(path)
        assert HEADERS.items() <= {name.title(): value for name, value in answer.headers.items()}.items()
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert "immutable" in client.get(css).headers["cache-control"]
    old = re.sub(r"static/\w+/", "static/000000000000/", css)
    assert client.get(old).headers["cache-control"] == "no-store"
    assert client.get(css.replace("console.css", "none.css")).status_code == 404
    assert client.get("/console/queue").headers["cache-control"] == "no-store"


def test_what_fails_is_a_page_for_a_person_and_a_notice_on_the_page_that_asked(client: httpx.Client) -> None:
    page = client.get("/console/nothing")
    assert page.status_code == 404
    assert "<h1>Not found</h1>" in page.text
    notice = client.get("/console/nothing", headers={"HX-Request": "true"})
    assert notice.headers["hx-retarget"] == "#notices"
    assert "<html" not in notice.text
    assert_problem(client.get("/nothing"), 404, "not-found")


@pytest.mark.parametrize(
    ("trusted", "is_believed"), [("", False), ("10.0.0.0/8", False), ("127.0.0.0/29", True)]
)
def test_only_a_proxy_that_was_named_tells_that_a_page_came_by_tls(
    engine: Engine, trusted: str, is_believed: bool
) -> None:
    with api_client(engine, trusted_proxies=trusted, hsts_seconds=60) as client:
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")  # no address that is believed unnamed
        with httpx.Client(base_url=client.base_url, transport=elsewhere) as proxy:
            page = proxy.get("/console/login", headers={"X-Forwarded-Proto": "https"})
            assert page.headers["set-cookie"].endswith("; Secure") == is_believed
            assert page.headers.get("strict-transport-security") == ("max-age=60" if is_believed else None)
            plain = proxy.get("/console/login")
            assert "strict-transport-security" not in plain.headers
            assert not plain.headers.get("set-cookie", "").endswith("; Secure")


def test_a_trusted_proxy_is_named_by_its_address() -> None:
    for trusted in ("*", "proxy.example", "10.0.0.0/99", "10.0.0.1,,"):
        with pytest.raises(ConfigurationError, match="VECTORMILL_TRUSTED_PROXIES"):
            parse_trusted_proxies(trusted)


def test_behind_tls_the_cookie_is_sent_over_tls_alone(engine: Engine) -> None:
    secret = add_key(engine, "me")
    with api_client(engine) as client:
        client.headers["X-Forwarded-Proto"] = "https"  # as a proxy on this machine tells
        page = client.get("/console/login")
        assert page.headers["set-cookie"].endswith("; Secure")
        visit = page.headers["set-cookie"].split(";")[0]
        (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', page.text)
        answer = client.post("/console/login", data={"csrf": csrf, "key": secret}, headers={"Cookie": visit})
        assert answer.status_code == 303
        assert answer.headers["set-cookie"].endswith("; Secure")
