"""What a stranger finds: arguments without secrets, workers that obey nobody, and a door that wants a key."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import make_url

from tests.acceptance.hosts import host, why_not
from tests.acceptance.stack import Stack
from tests.waiting import wait_for
from vectormill.broker.app import make_app


def test_no_secret_stands_in_the_arguments_of_a_process(stack: Stack) -> None:
    urls = stack.urls()
    secrets = [str(make_url(urls[name]).password) for name in ("database_url", "redis_url")]
    assert all(len(secret) > 30 for secret in secrets)
    commands = []
    for process in stack.processes():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            commands.append(" ".join(process.cmdline()))
    assert len(commands) > 6
    assert [command for command in commands if any(secret in command for secret in secrets)] == []


def test_the_model_process_knows_no_service(stack: Stack) -> None:
    known = stack.processes("runner_process")[0].environ()
    assert "PATH" in known
    assert not {"VECTORMILL_DATABASE_URL", "VECTORMILL_REDIS_URL"} & known.keys()


def test_workers_obey_nobody_who_speaks_through_redis_and_flower_still_shows_them(stack: Stack) -> None:
    def shown() -> bool:
        page = httpx.get(f"http://127.0.0.1:{stack.flower_port}/workers", params={"json": "1"}).json()
        return any(worker["status"] for worker in page["data"])

    wait_for(shown, 60, "Flower shows the worker")
    remote = make_app(stack.urls()["redis_url"]).control
    assert remote.ping(timeout=3) == []
    remote.shutdown()
    assert remote.ping(timeout=3) == []
    assert shown()


REASON = why_not()
READ_STATUS = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers=dict([sys.argv[2:]] if sys.argv[2:] else []))
try:
    print(urllib.request.urlopen(request, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code, error.headers["WWW-Authenticate"])
except urllib.error.URLError as error:
    print(error.reason)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_new_user_who_opens_the_api_is_told_to_make_a_key_and_other_hosts_need_it(data_dir: Path) -> None:
    stack = Stack(data_dir, options=["--host", "0.0.0.0"])
    try:
        refused = stack.spawn()
        assert refused.wait(timeout=100) == 2
        said = stack.log.read_text()
        assert f"Create a key with `vectormill keys create NAME --data-dir {data_dir}`" in said
        key = keys(data_dir, "create", "me").strip()
        stack.start()
        with host(3, {}) as stranger:
            api = f"http://{stranger.gateway}:{stack.api_port}"

            def ask(url: str, *header: str) -> str:
                log = data_dir.parent / "stranger.log"
                log.write_text("")
                assert stranger.start(["-c", READ_STATUS, url, *header], os.environ, log).wait(120) == 0
                return log.read_text()

            assert ask(f"{api}/v1/jobs") == '401 Bearer realm="vectormill"\n'
            assert ask(f"{api}/livez") == "200\n"
            assert ask(f"{api}/v1/jobs", "Authorization", f"Bearer {key}") == "200\n"
            assert "refused" in ask(f"http://{stranger.gateway}:{stack.flower_port}/workers")
            leaking = [each.pid for each in stack.processes() if key in " ".join(each.cmdline())]
            assert leaking == []
            keys(data_dir, "revoke", "me")
            gone = wait_for(lambda: find_refusal(ask(f"{api}/v1/jobs", "Authorization", f"Bearer {key}")))
            assert gone.startswith("403")
    finally:
        stack.destroy()


def find_refusal(answer: str) -> str | None:
    return None if answer == "200\n" else answer


def keys(data_dir: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "vectormill.cli", "keys", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout
