"""The Helm chart: rendered with several values, valid for Kubernetes, and true to the promises that it makes."""

import json
import re
import tomllib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import typer
import yaml

from tests.helm_chart import (
    CHART,
    GPU_WORKER,
    KEDA,
    ROOT,
    SCALED,
    SECRET,
    VALUES,
    HelmRefused,
    check,
    find_containers,
    find_pods,
    lint,
    pick,
    render,
)
from tests.unit.deployment.test_monitoring import find_unknown
from vectormill.cli.app import app
from vectormill.settings import PREFIX, SECRET_VARIABLES, WORKER_PREFIX, Settings
from worker.encoder.choice import PRECISIONS
from worker.placement.strategies import STRATEGIES
from worker.settings import WorkerSettings


class Rendered(dict[str, list[Any]]):
    """The documents of the chart by the name of their values, each rendered when it is first asked for."""

    def __missing__(self, name: str) -> list[Any]:
        self[name] = render(VALUES[name])
        return self[name]

    def list_all(self) -> list[list[Any]]:
        return [self[name] for name in VALUES]


RENDERED = Rendered()


def list_different(documents: Iterable[Any]) -> list[Any]:
    """Leave out repeats: most documents are the same for several values."""
    return list({json.dumps(document, sort_keys=True): document for document in documents}.values())


@pytest.fixture(scope="module")
def pods() -> list[Any]:
    return list_different(pod for documents in RENDERED.list_all() for _, pod in find_pods(documents))


@pytest.fixture(scope="module")
def everything() -> list[Any]:
    return RENDERED["all that there is"]


def test_what_is_rendered_is_what_kubernetes_takes() -> None:
    for document in list_different(chain(*RENDERED.list_all())):
        check(document)


def test_names_are_of_one_thing_each() -> None:
    for documents in RENDERED.list_all():
        names = [(each["kind"], each["metadata"]["name"]) for each in documents]
        assert len(set(names)) == len(names)


def test_no_pod_is_root_nor_writes_where_it_is_not_told_to(pods: list[Any]) -> None:
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        # VECTORMILL_API_PORT would be tcp://… by a Service named vectormill-api.
        assert pod["enableServiceLinks"] is False
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in find_containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (
                False,
                {"drop": ["ALL"]},
            )
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            written = {"/tmp"} if "flower" in container["command"] else {"/tmp", "/home/vectormill/.cache"}
            assert written <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_variables_are_settings_and_secrets_come_from_the_secret(pods: list[Any]) -> None:
    for pod in pods:
        known = {PREFIX + name.upper() for name in Settings.model_fields}
        known |= {WORKER_PREFIX + name.upper() for name in WorkerSettings.model_fields}
        for container in find_containers(pod):
            variables = {each["name"]: each for each in container["env"]}
            assert len(variables) == len(container["env"]), "one is given twice"
            assert variables.keys() <= known
            for name, variable in variables.items():
                if name in SECRET_VARIABLES:
                    assert variable["valueFrom"]["secretKeyRef"]["name"] == "vectormill-secrets"
                else:
                    assert isinstance(variable["value"], str)


def test_the_command_line_accepts_every_command(pods: list[Any]) -> None:
    for pod in pods:
        group = typer.main.get_command(app)
        for container in find_containers(pod):
            words = container["command"][1:]
            with group.make_context("vectormill", words) as context:
                found = group.get_command(context, words[0])  # type: ignore[attr-defined]
                assert found is not None, words
                found.make_context(words[0], words[1:], parent=context).close()


def test_a_worker_has_longer_to_stop_than_it_promises_to_take() -> None:
    for documents in RENDERED.list_all():
        for name, pod in find_pods(documents):
            if "-worker-" in name:
                assert pod["terminationGracePeriodSeconds"] > 60


def test_an_outage_of_postgres_ends_nobody(everything: list[Any]) -> None:
    """A readiness probe may ask Postgres. Where a liveness probe did, workers would be ended with their vectors."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    pods = dict(find_pods(everything))
    for subject, name in (("scheduler", "scheduler"), ("indexer", "indexer"), ("worker", "worker-big")):
        (container,) = pods[f"mill-vectormill-{name}"]["containers"]
        assert "livenessProbe" not in container
        assert "startupProbe" not in container
        asked = container["readinessProbe"]["exec"]["command"]
        assert ["CMD", *asked] == compose[subject]["healthcheck"]["test"]
    (api,) = pods["mill-vectormill-api"]["containers"]
    assert [api[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "startup", "readiness")] == [
        "/livez",
        "/livez",
        "/readyz",
    ]


def test_migrations_and_the_first_key_come_before_everything_else(everything: list[Any]) -> None:
    job = pick(everything, "Job", "migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["migrate"]
    assert [container["name"] for container in pod["containers"]] == ["first-key"]
    assert pod["serviceAccountName"] == "default", "the chart's own is not there yet"
    (alone,) = pick(RENDERED["nothing that can be left out"], "Job", "migrate")["spec"]["template"]["spec"][
        "containers"
    ]
    assert alone["command"] == ["vectormill", "migrate"]


def test_scheduler_and_migrations_go_past_a_pooler() -> None:
    pooled = render(SECRET | {"secrets": {"existingSecret": "s", "directDatabaseUrlKey": "direct"}})
    keys = {
        name: container["env"][0]["valueFrom"]["secretKeyRef"]["key"]
        for name, pod in find_pods(pooled)
        for container in pod["containers"]
    }
    direct = {name.removeprefix("mill-vectormill-") for name, key in keys.items() if key == "direct"}
    assert direct == {"scheduler", "migrate"}


def test_a_worker_is_scaled_by_its_own_backlog_and_down_to_nothing() -> None:
    documents = RENDERED["gpu"]
    deployment, scaled = (
        pick(documents, "Deployment", "worker-big"),
        pick(documents, "ScaledObject", "worker-big"),
    )
    assert "replicas" not in deployment["spec"], "an upgrade would set back what KEDA has chosen"
    assert pick(documents, "Deployment", "worker-small")["spec"]["replicas"] == 1
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (0, 4)
    assert scaled["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher", (
        "an outage of Prometheus would end the workers of a large job"
    )
    (trigger,) = scaled["spec"]["triggers"]
    assert find_unknown(trigger["metadata"]["query"]) == []
    names = re.findall(r"(vectormill_\w+)\{([^}]*)\}", trigger["metadata"]["query"])
    assert names == [
        ("vectormill_queue_waiting_chunks", 'model="my-7b"'),
        ("vectormill_queue_leased_chunks", 'model="my-7b"'),
    ]
    shared = KEDA["keda"] | {"prometheus": {**KEDA["keda"]["prometheus"], "matchers": 'namespace="vectors"'}}
    several = render(SECRET | {"keda": shared, "workers": [GPU_WORKER | SCALED]})
    query = pick(several, "ScaledObject", "worker-big")["spec"]["triggers"][0]["metadata"]["query"]
    assert query.count('{model="my-7b", namespace="vectors"}') == 2


def test_devices_cache_and_settings_reach_the_worker() -> None:
    pod = pick(RENDERED["gpu"], "Deployment", "worker-big")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", {"gpu": "h100"})
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["VECTORMILL_WORKER_PRECISION"] == "bf16"
    assert variables["VECTORMILL_WORKER_SLOTS"] == "32"
    assert json.loads(variables["VECTORMILL_MODELS"]) == {"my-7b": {"path": "/models/my-7b"}}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert container["command"] == ["vectormill", "worker", "--model", "my-7b"]


def test_a_setting_of_a_part_goes_before_that_of_all() -> None:
    values = SECRET | {
        "env": {"VECTORMILL_LOG_LEVEL": "WARNING"},
        "api": {"env": {"VECTORMILL_LOG_LEVEL": "DEBUG"}},
    }
    levels = {
        name.removeprefix("mill-vectormill-"): each["value"]
        for name, pod in find_pods(render(values))
        for each in pod["containers"][0]["env"]
        if each["name"] == "VECTORMILL_LOG_LEVEL"
    }
    assert levels == {
        "api": "DEBUG", "scheduler": "WARNING", "indexer": "WARNING", "worker-minilm": "WARNING", "migrate": "WARNING"
    }  # fmt: skip


def test_the_api_answers_under_the_names_of_its_service_and_of_the_ingress() -> None:
    documents = RENDERED["with an ingress"]
    (container,) = pick(documents, "Deployment", "api")["spec"]["template"]["spec"]["containers"]
    (hosts,) = [each["value"] for each in container["env"] if each["name"] == "VECTORMILL_ALLOWED_HOSTS"]
    service = pick(documents, "Service", "api")["metadata"]["name"]
    assert {service, f"{service}.vectors", f"{service}.vectors.svc", "vectors.example.org"} <= set(
        hosts.split(",")
    )
    (rule,) = pick(documents, "Ingress", "api")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == service


def find_allowed(direction: str, component: str) -> list[dict[str, Any]]:
    """Rules of all policies that select the pods of this component."""
    labels = {"app.kubernetes.io/component": component}
    found = []
    for policy in (each for each in RENDERED["all that there is"] if each["kind"] == "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        wanted = selector["matchLabels"].get("app.kubernetes.io/component", component)
        barred = [value for each in selector.get("matchExpressions", []) for value in each["values"]]
        if wanted == labels["app.kubernetes.io/component"] and component not in barred:
            found += policy["spec"].get(direction, [])
    return found


def test_every_process_reaches_what_it_needs_and_nothing_else() -> None:
    cases: tuple[tuple[str, set[int]], ...] = (
        ("api", {53, 5432, 6379, 443, 4318}),
        ("scheduler", {53, 5432, 6379, 443, 4318}),  # webhooks
        ("indexer", {53, 5432, 443, 3306, 4318}),  # and its sources
        ("worker-big", {53, 5432, 6379, 443, 4318}),  # the hub
        ("migrate", {53, 5432}),
    )
    for component, reached in cases:
        assert {
            port["port"] for rule in find_allowed("egress", component) for port in rule["ports"]
        } == reached


def test_nobody_is_reached_but_the_api_and_flower(everything: list[Any]) -> None:
    assert pick(everything, "NetworkPolicy", "default-deny")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    for component in ("scheduler", "indexer", "worker-big", "migrate"):
        assert find_allowed("ingress", component) == []
    (rule,) = find_allowed("ingress", "api")
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"team": "search"}}}]
    databases = [rule for rule in find_allowed("egress", "worker-big") if rule["ports"][0]["port"] == 5432]
    assert databases[0]["to"] == [{"ipBlock": {"cidr": "10.0.0.7/32"}}]


def test_flower_gets_redis_alone(everything: list[Any]) -> None:
    pod = pick(everything, "Deployment", "flower")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    secrets = {each["name"] for each in container["env"] if "valueFrom" in each}
    assert secrets == {"VECTORMILL_REDIS_URL", "VECTORMILL_FLOWER_BASIC_AUTH"}
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/tmp"]
    assert [rule["ports"][0]["port"] for rule in find_allowed("egress", "flower")] == [53, 6379]


def test_every_deployment_keeps_all_but_one_pod_when_nodes_are_drained(everything: list[Any]) -> None:
    deployments = {each["metadata"]["name"] for each in everything if each["kind"] == "Deployment"}
    budgets = {each["metadata"]["name"]: each for each in everything if each["kind"] == "PodDisruptionBudget"}
    assert deployments - budgets.keys() == {"mill-vectormill-flower"}, "which holds nothing"
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets.values())


def test_the_rules_are_those_of_prometheus(everything: list[Any]) -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))
    assert pick(everything, "PrometheusRule", "alerts")["spec"] == rules


def test_wrong_values_are_refused_with_words_that_help() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "Set secrets.existingSecret to the name of a Secret"),
        (SECRET | {"wrokers": []}, "additional properties 'wrokers' not allowed"),
        (SECRET | {"workers": [{"name": "a"}]}, "missing property 'model'"),
        (SECRET | {"workers": [{"name": "A b", "model": "m"}]}, "does not match pattern"),
        (SECRET | {"workers": [{"name": "a", "model": "m"}] * 2}, "Two workers are named a"),
        (SECRET | {"workers": [{"name": "a", "model": "m"} | SCALED]}, "set keda.prometheus.serverAddress"),
        (
            SECRET
            | KEDA
            | {"workers": [{"name": "a", "model": "m", "autoscaling": {"enabled": True, "minReplicas": 9}}]},
            "minReplicas is above maxReplicas",
        ),
        (SECRET | {"workerGraceSeconds": 30}, "minimum: got 30, want 61"),
        (
            SECRET | {"env": {"VECTORMILL_DATABASE_URL": "postgresql://me:moonshine@db/x"}},
            "VECTORMILL_DATABASE_URL",
        ),
        (SECRET | {"env": {"VECTORMILL_LEASE_SECONDS": 60}}, "want string"),
        (SECRET | {"ingress": {"enabled": True}}, "ingress.enabled requires ingress.hosts"),
        (SECRET | {"serviceMonitor": {"enabled": True}}, "Set serviceMonitor.bearerKey"),
    )
    for values, words in cases:
        with pytest.raises(HelmRefused) as refused:
            render(values)
        assert words in str(refused.value)
        assert "moonshine" not in str(refused.value)


def test_helm_finds_nothing_to_complain_of() -> None:
    report = lint(SECRET)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"] if message["severity"] > 1] == []


def test_the_schema_of_values_knows_what_the_code_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    worker = schema["$defs"]["worker"]["properties"]
    assert set(worker["precision"]["enum"]) == {"auto", *PRECISIONS}
    assert set(worker["strategy"]["enum"]) == {"auto", *STRATEGIES}
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert schema["properties"].keys() == values.keys() | {"global"}


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert (chart["appVersion"], chart["version"]) == (version, version)
