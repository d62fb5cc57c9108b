"""Both images and docker-compose.yml on a real engine: built, used, killed, upgraded, backed up and restored."""

import csv
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.release import build_images
from tests.blackbox.service import Service, assert_close, wait_for
from tests.images.engine import Engine, new_engine
from tests.images.stand_ins import ROOT, build_stand_ins, serve_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMPOSE = ROOT / "docker-compose.yml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
OURS = [name for name, each in SERVICES.items() if each["image"].startswith("vectormill-")]

# Import a module, and print of each of our packages' modules that are then loaded whether its bytecode is stored.
FIND_BYTECODE = """
import os, sys, {}
stored = [getattr(module, "__cached__", None) or "" for module in list(sys.modules.values())]
print(*[os.path.exists(path) for path in stored if path.startswith("/opt/venv/")])
"""


class ComposedService(Service):
    """The service of docker-compose.yml, used from outside as that of `vectormill up` is."""

    def __init__(self, engine: Engine, folder: Path, index: str) -> None:
        super().__init__(Path(sys.executable).parent / "vectormill", folder)
        self.engine, self.index = engine, index
        key = f"vmk_{secrets.token_hex(32)}"
        self.http.headers["Authorization"] = f"Bearer {key}"
        self.environment |= {"VECTORMILL_API_URL": self.api_url, "VECTORMILL_API_KEY": key}
        (folder / ".env").write_text(
            f"API_KEY={key}\nPOSTGRES_PASSWORD=pp\nOWNER_PASSWORD=oo\nSERVICE_PASSWORD=ss\nREADER_PASSWORD=rr\nVALKEY_PASSWORD=vv\nFLOWER_BASIC_AUTH=me:ff\n"
            f"API_PORT={self.api_port}\nFLOWER_PORT={self.flower_port}\nMODELS_DIR={folder}\nTORCH_CPU_INDEX_URL={index}\n"
        )
        self.label_images("first")

    def label_images(self, release: str) -> None:
        """Let the next builds carry a label, so that their images differ; builds use the network of this machine."""
        build = {"network": "host", "labels": {"release": release}}
        services = {name: {"build": build} for name, each in SERVICES.items() if "build" in each}
        (self.folder / "build.yml").write_text(yaml.safe_dump({"services": services}))

    def compose(self, *arguments: str, **others: Any) -> str:
        files = ["--file", str(COMPOSE), "--file", f"{self.folder}/build.yml"]
        settings = ["--env-file", f"{self.folder}/.env", "--profile", "cpu"]
        return self.engine.docker("compose", *files, *settings, *arguments, **others)

    def start(self) -> None:
        """Do what UPGRADE.md says: build, migrate, and replace what has changed."""
        self.compose("up", "--detach", "--build", "--quiet-pull")
        wait_for(self.is_ready, "the service is ready", 180)

    def is_ready(self) -> bool:
        try:
            answer = self.http.get("/readyz").json()
        except (httpx.HTTPError, ValueError):
            return False
        return all([answer["status"] == "ok", answer["workers"], answer["scheduler"], answer["indexer"]])

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        psql = ("psql", "--username", "vectormill", "--csv", "--tuples-only", "--command", statement)
        printed = self.compose("exec", "-T", "postgres", *psql)
        return [tuple(row) for row in csv.reader(printed.splitlines())]

    def images(self) -> dict[str, str]:
        """Return the release of the image that each container of ours runs."""
        shown = '{{index .Config.Labels "com.docker.compose.service"}} {{index .Config.Labels "release"}}'
        ids = self.compose("ps", "--quiet", *OURS).split()
        lines = self.engine.docker("inspect", "--format", shown, *ids).splitlines()
        return dict(line.split() for line in lines)

    def crash(self, name: str) -> None:
        """Kill the processes of a container as the system does that has no memory left; Docker starts it again."""
        container = self.compose("ps", "--quiet", name).strip()
        pid = self.engine.docker("inspect", "--format", "{{.State.Pid}}", container)
        os.kill(int(pid), signal.SIGKILL)

        def has_restarted() -> bool:
            return self.engine.docker("inspect", "--format", "{{.RestartCount}}", container).strip() != "0"

        wait_for(has_restarted, f"{name} is started again")


@pytest.fixture(scope="module")
def service() -> Iterator[ComposedService]:
    folder = Path(tempfile.mkdtemp(prefix="vm-", dir="/tmp"))
    with new_engine(folder) as engine, serve_packages(folder) as index:
        build_stand_ins(engine, folder, index)
        composed = ComposedService(engine, folder, index)
        try:
            composed.start()
            yield composed
        except AssertionError:
            print(composed.compose("logs", "--tail", "40"))
            raise
        finally:
            composed.http.close()
    shutil.rmtree(folder)


def submit_many(service: ComposedService, name: str) -> tuple[str, dict[str, str]]:
    """Submit a job of many texts, and return it, and them, when its first vectors are there."""
    texts = {f"k{n}": f"{name} {n} " + "some words of text " * (n % 20) for n in range(1500)}
    job = service.submit(texts, collection=name)
    wait_for(lambda: service.ask("GET", f"/v1/jobs/{job}")["num_done"] > 0, "the first vectors are there")
    assert service.ask("GET", f"/v1/jobs/{job}")["state"] == "running", (
        "a test would break nothing that is under way"
    )
    return job, texts


def assert_whole(service: ComposedService, job: str, name: str, texts: dict[str, str]) -> None:
    ended = service.wait(job, 400)
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == ("completed", len(texts), 0)
    rows = service.rows(name)
    assert rows.keys() == texts.keys()
    assert_close(rows["k1499"], service.embed([texts["k1499"]])[0])


def test_images_have_the_bytecode_of_all_that_they_run(service: ComposedService) -> None:
    for name, module in (("api", "api.app"), ("worker-cpu", "worker.runner.runner_process")):
        loaded = service.compose("exec", "-T", name, "python", "-c", FIND_BYTECODE.format(module)).split()
        assert len(loaded) > 100
        assert "False" not in loaded, f"{name} compiles what it imports at each start"


def test_a_release_has_both_images(service: ComposedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", service.engine.environment["DOCKER_HOST"])
    built = build_images("9.8.7", "--network", "host", "--build-arg", f"TORCH_INDEX_URL={service.index}")
    shown = '{{index .RepoTags 0}} {{.Id}} {{index .Config.Labels "org.opencontainers.image.version"}}'
    seen = [service.engine.docker("inspect", "--format", shown, line.split()[1]).strip() for line in built]
    assert seen == [f"{line} 9.8.7" for line in built]
    assert [line.split()[0] for line in built] == ["vectormill-api:9.8.7", "vectormill-worker:9.8.7"]


def test_texts_become_vectors_that_are_found(service: ComposedService) -> None:
    texts = service.folder / "texts.jsonl"
    texts.write_text(
        '{"key": "mill", "text": "The mill grinds corn."}\n{"key": "sea", "text": "Ships sail."}\n'
    )
    service.wait(service.run("submit", str(texts), "--collection", "first").stdout.strip())
    found = service.ask("POST", "/v1/collections/first/search", json={"text": "Who grinds the corn?"})
    assert [row["key"] for row in found["data"]] == ["mill", "sea"]
    wait_for(
        lambda: "starting" not in service.compose("ps", "--format", "{{.Health}}"), "all have been checked"
    )
    states = service.compose("ps", "--format", "{{.Service}} {{.Health}}").splitlines()
    assert all(state.endswith(" healthy") for state in states), states


@pytest.mark.parametrize("name", ["worker-cpu", "postgres", "valkey"])
def test_a_killed_container_costs_time_and_no_item(service: ComposedService, name: str) -> None:
    collection = f"killed_{name.partition('-')[0]}"
    job, texts = submit_many(service, collection)
    service.crash(name)
    wait_for(service.is_ready, "the service is ready again")
    assert_whole(service, job, collection, texts)


def test_an_upgrade_replaces_every_container_while_a_job_runs(service: ComposedService) -> None:
    job, texts = submit_many(service, "upgraded")
    service.label_images("second")
    service.start()
    assert set(service.images().values()) == {"second"}
    assert_whole(service, job, "upgraded", texts)


def test_a_backup_restores_the_service_with_every_row(service: ComposedService) -> None:
    job, texts = submit_many(service, "kept")
    assert_whole(service, job, "kept", texts)
    expected = service.rows("kept")
    dump = service.folder / "vectormill.dump"
    with dump.open("wb") as output:
        pg_dump = ("pg_dump", "--username", "vectormill", "--format=custom", "vectormill")
        service.compose("exec", "postgres", *pg_dump, output=output)
    service.compose("down", "--volumes")
    service.compose("up", "--detach", "--wait", "postgres")
    with dump.open("rb") as given:
        restore = ("pg_restore", "--username", "vectormill", "--dbname", "vectormill")
        flags = ("--no-owner", "--exit-on-error", "--single-transaction")
        service.compose("exec", "-T", "postgres", *restore, *flags, given=given)
    service.start()
    assert service.rows("kept") == expected
    assert_whole(
        service, service.submit({"k1499": texts["k1499"]}, collection="new"), "new", {"k1499": texts["k1499"]}
    )
