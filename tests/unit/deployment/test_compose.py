"""docker-compose.yml against the Compose schema and against the promises it makes. No Docker engine is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from redis import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.architecture.sources import PACKAGES
from tests.waiting import wait_for
from vectormill.embedded.binaries import find_postgres, find_valkey_server
from vectormill.embedded.valkey import NO_RETRY
from vectormill.processes.lifetimes import free_port
from vectormill.settings import PREFIX, Settings
from vectormill.up import Endpoint, UpOptions, plan_children
from worker.devices.detect import LEAST_SHARED_BYTES
from worker.launcher import GRACE_SECONDS
from worker.runner.runner import KILL_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[3]
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OPENED_TEXT = (ROOT / "deploy/compose.servers.yml").read_text(encoding="utf-8")
OPENED: dict[str, Any] = yaml.safe_load(OPENED_TEXT)

OWN = sorted(name for name, service in SERVICES.items() if service.get("command", [""])[0] == "vectormill")
LONG_RUNNING = sorted(name for name in SERVICES if name not in ("roles", "migrate", "keys"))
INTERPOLATION = re.compile(r"\$\{(?P<name>\w+)(?P<operator>:[-?])?(?P<rest>[^}]*)\}")
SECRET = re.compile(r"PASSWORD|AUTH|TOKEN|SECRET|KEY", re.IGNORECASE)


def find_profile(profile: str) -> dict[str, dict[str, Any]]:
    """The services that `docker compose --profile NAME up` starts."""
    return {
        name: service for name, service in SERVICES.items() if profile in service.get("profiles", [profile])
    }


def test_the_file_fits_the_compose_specification() -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    for file in (COMPOSE, OPENED):
        jsonschema.Draft202012Validator(schema).validate(file)


def test_a_worker_is_killed_by_nobody_before_the_time_that_is_promised() -> None:
    """What would be killed at each level ends the level below first: model process, launcher, container."""
    for name in ("worker", "worker-cpu"):
        assert SERVICES[name]["stop_grace_period"] == "60s"
    assert STOP_TIMEOUT_SECONDS + KILL_TIMEOUT_SECONDS < GRACE_SECONDS < 60


def test_containers_run_what_up_runs() -> None:
    api, flower = Endpoint("0.0.0.0", 8000), Endpoint("0.0.0.0", 5555)
    options = UpOptions(Settings(), ("${MODEL:-all-MiniLM-L6-v2}",), {}, ("vectormill",))
    children = plan_children(options, api, flower, {}, Path("logs"))
    commands = {child.name: list(child.argv) for child in children}
    first_key = ["vectormill", "keys", "create", "compose", "--scope", "admin", "--from-environment"]
    roles = ["vectormill", "roles", "--admin-env", "ADMIN_DATABASE_URL", "--own-database"]
    once = {"roles": roles, "migrate": ["vectormill", "migrate"], "keys": first_key}
    assert commands | once == {
        name: service["command"] for name, service in find_profile("gpu").items() if name in OWN
    }


def test_flower_gets_redis_alone() -> None:
    environ = {
        "PATH": "/bin",
        "VECTORMILL_DATABASE_URL": "postgresql://me:moonshine@db/x",
        "VECTORMILL_REDIS_URL": "redis://:moonshine@queue/0",
        "VECTORMILL_FLOWER_BASIC_AUTH": "me:moonshine",
        "VECTORMILL_API_KEY": "vmk_moonshine",
        "HF_TOKEN": "hf_moonshine",
    }
    nowhere = Endpoint("127.0.0.1", 1)
    *others, flower = plan_children(UpOptions(Settings(), (), {}), nowhere, nowhere, environ, Path("logs"))
    assert all(child.env == environ for child in others)
    secrets = {"VECTORMILL_REDIS_URL", "VECTORMILL_FLOWER_BASIC_AUTH"}
    assert flower.env.keys() == {"PATH"} | secrets
    assert SERVICES["flower"]["environment"].keys() == secrets
    assert SERVICES["flower"]["volumes"] == []


def test_gpu_and_cpu_profiles_differ_in_the_worker_alone() -> None:
    gpu, cpu = find_profile("gpu"), find_profile("cpu")
    assert gpu.keys() - cpu.keys() == {"worker"}
    assert cpu.keys() - gpu.keys() == {"worker-cpu"}
    assert gpu["worker"]["command"] == cpu["worker-cpu"]["command"]
    assert gpu["worker"]["environment"] == cpu["worker-cpu"]["environment"]
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["worker"]
    devices = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


@pytest.mark.parametrize("name", OWN)
def test_every_variable_is_a_setting(name: str) -> None:
    variables = {variable for variable in SERVICES[name]["environment"] if variable.startswith(PREFIX)}
    if name != "flower":
        assert {"VECTORMILL_DATABASE_URL", "VECTORMILL_REDIS_URL", "VECTORMILL_MODELS"} <= variables
    assert variables <= {PREFIX + field.upper() for field in Settings.model_fields}


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_every_long_running_service_is_watched_and_restarted(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert {"test", "interval", "timeout", "retries"} <= SERVICES[name]["healthcheck"].keys()


def test_migrations_run_once_and_before_whoever_reads_the_tables() -> None:
    assert SERVICES["migrate"]["restart"] == "no"
    for name in ("keys", "api", "scheduler", "indexer", "worker", "worker-cpu"):
        assert SERVICES[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}, (
            name
        )


def test_the_first_key_comes_from_a_secret_before_the_api_listens() -> None:
    assert SERVICES["keys"]["restart"] == "no"
    assert SERVICES["keys"]["environment"]["VECTORMILL_API_KEY"].startswith("${API_KEY:?")
    assert SERVICES["api"]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert "VECTORMILL_API_KEY" not in SERVICES["api"]["environment"]


def test_a_dependency_on_health_is_one_on_a_service_that_has_a_health_check() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed], (
                f"{name} on {needed}"
            )


def test_a_submission_needs_no_redis() -> None:
    assert "valkey" not in SERVICES["api"]["depends_on"]


def test_no_secret_stands_in_the_file_and_a_missing_one_stops_the_start() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), (
                    f"{name}: {variable} must be ${{NAME:?message}}"
                )
    for match in INTERPOLATION.finditer(COMPOSE_TEXT):
        if SECRET.search(match["name"]):
            assert match["operator"] == ":?", match[0]
    assert not re.search(r"://[^:/@\s]*:(?!\$\{)[^@\s]+@", COMPOSE_TEXT), "a URL carries a literal password"


def test_no_secret_is_an_argument_of_a_process() -> None:
    """Every user of a host reads the arguments of every process; a name after $$ is the container's shell's to find."""
    for name, service in SERVICES.items():
        for words in (service.get("command", []), service.get("healthcheck", {}).get("test", [])):
            for word in words:
                assert not any(SECRET.search(match["name"]) for match in INTERPOLATION.finditer(word)), name


def test_valkey_is_not_root_asks_for_the_password_and_keeps_nothing(tmp_path: Path) -> None:
    assert SERVICES["valkey"]["user"] == "valkey"
    shell, flag, script = SERVICES["valkey"]["command"]
    script = script.replace("$$", "$").replace("valkey-server -", f"{find_valkey_server()} - --port $PORT")
    environment = {"PATH": os.defpath, "REDISCLI_AUTH": "moonshine", "PORT": str(free_port())}
    # The embedded server knows no TLS; other lines show that those of deploy/compose.servers.yml are read.
    environment["TLS_SETTINGS"] = "timeout 77\nhz 11\n"
    with subprocess.Popen(
        [shell, flag, script], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as server:
        try:
            with Redis(port=int(environment["PORT"]), password="moonshine", retry=NO_RETRY) as client:
                wait_for(lambda: answers(client), because="Valkey answers")
                wanted = {
                    "save": "",
                    "appendonly": "no",
                    "maxmemory": "268435456",
                    "maxmemory-policy": "noeviction",
                    "timeout": "77",
                    "hz": "11",
                }
                assert {name: client.config_get(name)[name] for name in wanted} == wanted
                assert not any("moonshine" in word for word in psutil.Process(server.pid).cmdline())
            with (
                Redis(port=int(environment["PORT"]), retry=NO_RETRY) as stranger,
                pytest.raises(AuthenticationError),
            ):
                stranger.ping()
        finally:
            server.terminate()


def answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisConnectionError:
        return False


def test_every_variable_of_the_file_is_explained_in_the_example_environment() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    explained = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.MULTILINE))
    used = {match["name"]: match["operator"] for match in INTERPOLATION.finditer(COMPOSE_TEXT)}
    opening = {match["name"] for match in INTERPOLATION.finditer(OPENED_TEXT)} | {"COMPOSE_FILE"}
    environments = [service.get("environment", {}) for service in SERVICES.values()]
    passed_on = {name for environment in environments for name, value in environment.items() if value is None}
    assert explained.keys() == used.keys() | passed_on | opening
    assert all((ROOT / name).is_file() for name in explained["COMPOSE_FILE"].split(":"))
    required = {name for name, operator in used.items() if operator == ":?"}
    assert {name for name in explained if re.search(rf"^{name}=$", example, re.MULTILINE)} == required


def test_servers_are_pinned_and_our_own_images_are_built_from_here() -> None:
    for name, service in SERVICES.items():
        if service["image"].startswith("vectormill-"):
            assert service["pull_policy"] == "never", name
        else:
            tag = service["image"].partition(":")[2]
            assert re.match(r"v?\d+\.\d+\.\d+", tag), f"{name}: the tag {tag!r} moves"


def test_compose_has_the_postgres_and_the_pgvector_of_the_embedded_server() -> None:
    """So that a backup of one is restored into the other, and what was tested with one holds for the other."""
    embedded = find_postgres(None)
    (control,) = embedded.directory.glob("share/**/vector.control")
    (version,) = re.findall(r"^default_version = '(.+)'$", control.read_text(), re.MULTILINE)
    assert SERVICES["postgres"]["image"] == f"pgvector/pgvector:{version}-pg{embedded.major_version}"


def test_memory_cores_and_logs_of_containers_have_bounds_that_the_environment_sets() -> None:
    for name in LONG_RUNNING:
        options = SERVICES[name]["logging"]["options"]
        assert {"max-size", "max-file"} == options.keys(), name
    for name in OWN:
        assert re.fullmatch(r"\$\{(SERVICE|WORKER)_MEMORY:-0\}", SERVICES[name]["mem_limit"]), name
    for name in ("worker", "worker-cpu"):
        assert SERVICES[name]["cpus"] == "${WORKER_CPUS:-0}"
    assert SERVICES["postgres"]["mem_limit"] == "${POSTGRES_MEMORY:-0}"
    assert SERVICES["valkey"]["mem_limit"] == "512m"


def test_uv_of_the_lock_installs_the_images(tmp_path: Path) -> None:
    """The awk of the Dockerfiles finds the whole entry, with its hashes."""
    text = (ROOT / "deploy" / "Dockerfile.api").read_text(encoding="utf-8")
    (program,) = re.findall(r"awk '([^']*)'", text)
    printed = subprocess.check_output(["awk", program, ROOT / "requirements.lock"], text=True).splitlines()
    assert printed[0].startswith("uv==")
    assert len(printed) > 10
    assert all(line.lstrip().startswith("--hash=sha256:") for line in printed[1:])


def test_containers_of_ours_can_gain_and_write_nothing() -> None:
    for name in OWN:
        service = SERVICES[name]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]


def test_the_servers_are_reached_by_our_containers_alone() -> None:
    assert COMPOSE["networks"]["back"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if service["networks"] == ["back"]} == {
        "postgres",
        "valkey",
    }
    assert {"prometheus", "grafana"} == {
        name for name, service in SERVICES.items() if service["networks"] == ["front"]
    }


def test_other_machines_reach_the_servers_at_one_address_that_must_be_named_and_valkey_by_tls_alone() -> None:
    assert OPENED["services"].keys() == {"postgres", "valkey"}
    for service in OPENED["services"].values():
        assert service["networks"] == ["back", "servers"]
        assert [port.startswith("${SERVERS_BIND:?") for port in service["ports"]] == [True]
    postgres, valkey = OPENED["services"]["postgres"], OPENED["services"]["valkey"]
    settings = dict(line.split() for line in valkey["environment"]["TLS_SETTINGS"].splitlines())
    assert valkey["ports"][0].endswith(f":{settings['tls-port']}")
    assert valkey["volumes"] == postgres["volumes"] == ["${TLS_DIR:-./tls}:/tls:ro"]
    flags = dict(re.findall(r"^--(ssl\w*)=(.*)$", "\n".join(SERVICES["postgres"]["command"]), re.MULTILINE))
    assert flags["ssl"] == "${SERVERS_TLS:-off}"
    assert (flags["ssl_cert_file"], flags["ssl_key_file"]) == (
        settings["tls-cert-file"],
        settings["tls-key-file"],
    )
    page = (ROOT / "docs/MACHINES.md").read_text(encoding="utf-8")
    assert {Path(path).name for path in settings.values() if path.startswith("/")} <= set(
        re.findall(r"\w+\.\w+", page)
    )


def test_nccl_has_more_shared_memory_than_a_container_is_given_by_default() -> None:
    assert SERVICES["worker"]["shm_size"] == "2gb"
    assert LEAST_SHARED_BYTES < 2 << 30, "and its worker does not warn"


def test_the_image_of_workers_has_what_triton_compiles_with() -> None:
    """Triton builds a C module for each kernel: it needs a compiler, the C library's headers and those of Python."""
    text = (ROOT / "deploy" / "Dockerfile.worker").read_text(encoding="utf-8").replace("\\\n", "")
    *_, last = text.split("\nFROM ")
    (installed,) = re.findall(r"^RUN .*apt-get install ([^&]*)", last, re.MULTILINE)
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    # Docker's images of Python have its headers, those of Debian have not.
    assert last.startswith("python:")
    # Modules are kept and loaded where a container may write; the folders of compilers are below that.
    assert SERVICES["worker"]["read_only"]
    assert "cache:/home/vectormill/.cache" in SERVICES["worker"]["volumes"]
    assert "apt-get" not in re.sub(r"^RUN apt-get update.*$", "", last, flags=re.MULTILINE), (
        "nothing is removed again"
    )


def test_images_are_made_of_the_wheel_and_the_lock_and_their_user_is_not_root() -> None:
    for dockerfile in ("Dockerfile.api", "Dockerfile.worker"):
        text = (ROOT / "deploy" / dockerfile).read_text(encoding="utf-8").replace("\\\n", "")
        installs = re.findall(r"pip install ([^&;\n]*)", text)
        assert len(installs) >= 3
        assert all(re.search(r"requirements\.lock|--no-deps", arguments) for arguments in installs)
        assert "--editable" not in text
        assert re.search(
            r"-m build [^&]*--wheel --outdir /dist +&& uv pip install --no-deps /dist/vectormill-", text
        )
        build, last = text.split("\nFROM ")[1:]
        assert build != last, "the last stage has none of the tools of the first"
        assert "\nUSER vectormill\n" in last
        owned = r"install --directory --owner vectormill --group vectormill /home/vectormill/\.cache\s"
        assert re.search(owned, last)
        copied = re.findall(r"^COPY (.*)$", last, re.MULTILINE)
        assert copied == [
            "--from=build /opt/venv /opt/venv",
            "deploy/healthcheck.py /app/deploy/healthcheck.py",
        ]
        assert "\nENV UV_COMPILE_BYTECODE=1\n" in build
    for name in {*OWN} - {"flower"}:
        assert "cache:/home/vectormill/.cache" in SERVICES[name]["volumes"], name


def test_an_address_is_checked_by_the_standard_library_alone() -> None:
    """It is checked every ten seconds, and loading our packages takes a second or two of a processor."""
    command = [
        sys.executable,
        "-S",
        str(ROOT / "deploy/healthcheck.py"),
        f"http://127.0.0.1:{free_port()}/readyz",
    ]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert (checked.returncode, "Cannot check http" in checked.stderr) == (1, True), checked.stderr


def test_each_of_our_images_is_built_by_one_service() -> None:
    """Compose builds an image once for each service that says how, and keeps every result."""
    built = {
        service["image"]: service["build"]["dockerfile"]
        for service in SERVICES.values()
        if "build" in service
    }
    assert built == {
        "vectormill-api:${VERSION:-latest}": "deploy/Dockerfile.api",
        "vectormill-worker:${VERSION:-cuda}": "deploy/Dockerfile.worker",
        "vectormill-worker:${VERSION:-cpu}": "deploy/Dockerfile.worker",
    }
    assert len(built) == sum("build" in service for service in SERVICES.values())
    assert built.keys() == {SERVICES[name]["image"] for name in OWN}


def test_an_image_s_build_is_given_all_that_a_wheel_is_made_of() -> None:
    given = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    wanted = {*PACKAGES, "alembic", "setup.py", "pyproject.toml", "requirements.lock", "README.md", "LICENSE"}
    assert {f"!{name}" for name in wanted} <= set(given)
