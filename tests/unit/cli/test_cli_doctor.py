import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vectormill.cli import doctor as checks
from vectormill.cli.app import main
from vectormill.cli.doctor import judge_pgvector, judge_postgres
from vectormill.processes.lifetimes import free_port
from vectormill.settings import Settings


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_URL", "DATABASE_URL", "REDIS_URL", "MODELS", "DATA_DIR"):
        monkeypatch.delenv("VECTORMILL_" + name, raising=False)


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json", *arguments])
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return int(end.value.code or 0), {finding["name"]: finding for finding in findings}


def test_a_machine_that_was_set_up_has_all_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = diagnose(capsys, "--data-dir", str(tmp_path))
    assert code == 0
    assert {"python", "packages", "worker packages", "data dir", "memory", "postgres", "redis", "cpu"} <= set(
        findings
    )
    assert findings["postgres"]["detail"].startswith("embedded")
    assert findings["model all-MiniLM-L6-v2"]["detail"] == "384 dimensions, up to 256 tokens"


def test_servers_that_are_away_are_named_without_their_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("VECTORMILL_DATABASE_URL", f"postgresql://me:s3cret@127.0.0.1:{port}/db")
    monkeypatch.setenv("VECTORMILL_REDIS_URL", f"redis://:s3cret@127.0.0.1:{port}/0")
    code, findings = diagnose(capsys, "--data-dir", str(tmp_path), "--api-url", f"http://127.0.0.1:{port}")
    assert code == 1
    for name, advice in (("postgres", "DATABASE_URL"), ("redis", "REDIS_URL"), ("service", "vectormill up")):
        assert findings[name]["status"] == "fail"
        assert advice in findings[name]["advice"]
    assert "s3cret" not in json.dumps(findings)


def ask_api(monkeypatch: pytest.MonkeyPatch, key: str | None, **worker: Any) -> list[checks.Finding]:
    """Return what is found of a service that wants a key and has a worker."""
    ready = {"status": "ok", "postgres": True, "redis": True, "workers": 1, "scheduler": True}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200, json=ready)
        if request.headers.get("Authorization") != "Bearer vmk_ours":
            return httpx.Response(401, json={})
        return httpx.Response(200, json={"data": [{"name": "w", "model": "mini", "slots": 6, **worker}]})

    make = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", make)
    return list(checks.ask_api("http://127.0.0.1:1", key))


@pytest.mark.parametrize("key", [None, "vmk_ours", "vmk_another"])
def test_a_service_that_runs_is_asked_how_it_is_and_whether_it_knows_our_key(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service,) = ask_api(monkeypatch, key)
    assert service.detail.startswith("http://127.0.0.1:1 is ok, 1 workers")
    assert service.status == ("ok" if key == "vmk_ours" else "warn")
    assert ("VECTORMILL_API_KEY" in service.advice) == (key != "vmk_ours")


def test_a_worker_that_cannot_load_its_model_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = {"state_reason": "openvino was killed by SIGFPE"}
    _, worker = ask_api(monkeypatch, "vmk_ours", slots=0, report=reason)
    assert (worker.status, worker.detail) == ("fail", "cannot load mini: openvino was killed by SIGFPE")


def test_a_model_that_is_not_there_is_a_failure_of_that_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_MODELS", json.dumps({"mine": {"path": str(tmp_path / "missing")}}))
    code, findings = diagnose(capsys, "--data-dir", str(tmp_path))
    assert code == 1
    assert findings["model mine"]["status"] == "fail"
    assert findings["model all-MiniLM-L6-v2"]["status"] == "ok"


def test_doctor_asks_for_the_pgvector_that_the_docs_ask_for() -> None:
    for installed, available, status in [
        ("0.8.6", "0.8.6", "ok"),
        (None, "0.8.4", "ok"),  # migrations enable it
        ("0.8.3", "0.8.6", "warn"),  # an HNSW index may be damaged in vacuum
        ("0.7.0", "0.7.0", "warn"),
        ("0.6.2", "0.6.2", "fail"),  # no halfvec
        (None, None, "fail"),
    ]:
        assert judge_pgvector(installed, available).status == status


def test_doctor_warns_of_a_postgres_that_nobody_tested() -> None:
    for number, name, status in [(180006, "18.6", "ok"), (150010, "15.10", "warn")]:
        finding = judge_postgres(number, name)
        assert (finding.status, finding.detail) == (status, f"version {name}")


@pytest.mark.parametrize(
    ("free_bytes", "status"),
    [(100 << 30, "ok"), (5 << 30, "warn"), (1 << 20, "fail")],
)
def test_a_disk_that_gets_full_is_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    (finding,) = checks.check_data_dir(Settings(data_dir=tmp_path / "not" / "yet"))
    assert finding.status == status
    assert not (tmp_path / "not").exists(), "doctor changes nothing"


def test_a_directory_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = checks.check_data_dir(Settings(data_dir=tmp_path))
    assert finding.status == "fail"


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings) -> Iterator[checks.Finding]:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(checks, "CHECKS", {"odd": broken, "python": checks.check_python})
    findings = list(checks.run_checks(Settings()))
    assert [(finding.name, finding.status) for finding in findings] == [("odd", "fail"), ("python", "ok")]
    assert "odd machine" in findings[0].detail


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WORKER_PACKAGES", ("torch", "no-such-package"))
    findings = {finding.name: finding for finding in checks.check_packages(Settings())}
    assert findings["worker packages"].status == "warn"
    assert "no-such-package missing" in findings["worker packages"].detail
