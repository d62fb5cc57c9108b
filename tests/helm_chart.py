"""Render the chart as Helm would, without a cluster, and check the documents against schemas."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy/helm/vectormill"
CUSTOM: Final = json.loads((ROOT / "tests/schemas/custom-resources.json").read_text(encoding="utf-8"))
# The oldest Kubernetes that Chart.yaml allows, and the newest with available schemas.
KUBERNETES: Final = ("1.27", kubernetes_validate.latest_version())

Document = dict[str, Any]
SECRET: Final[Document] = {"secrets": {"existingSecret": "vectormill-secrets"}}
GPU_WORKER: Final[Document] = {
    "name": "big",
    "model": "my-7b",
    "precision": "bf16",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "resources": {
        "limits": {"nvidia.com/gpu": 2, "memory": "64Gi"},
        "requests": {"cpu": "8", "memory": "64Gi"},
    },
    "cacheVolume": {"persistentVolumeClaim": {"claimName": "cache"}},
    "env": {"VECTORMILL_WORKER_SLOTS": "32"},
}
SCALED: Final[Document] = {"autoscaling": {"enabled": True, "minReplicas": 0, "maxReplicas": 4}}
KEDA: Final[Document] = {"keda": {"prometheus": {"serverAddress": "http://prometheus.monitoring:9090"}}}
MODELS: Final[Document] = {
    "models": {"my-7b": {"path": "/models/my-7b"}},
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
}
VALUES: Final[dict[str, Document]] = {
    "defaults": SECRET,
    "gpu": SECRET
    | KEDA
    | MODELS
    | {"workers": [GPU_WORKER | SCALED, {"name": "small", "model": "all-MiniLM-L6-v2"}]},
    "without autoscaling": SECRET | MODELS | {"workers": [GPU_WORKER | {"replicas": 3}]},
    "with an ingress": SECRET
    | {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["vectors.example.org"],
            "tlsSecret": "tls",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "0"},
        }
    },
    "all that there is": SECRET
    | KEDA
    | MODELS
    | {
        "workers": [GPU_WORKER | SCALED],
        "flower": {"enabled": True},
        "serviceMonitor": {"enabled": True, "bearerKey": "metrics-key", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicies": {
            "database": {"port": 5432, "to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}]},
            "apiFrom": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}],
            "collector": {"port": 4318, "to": []},
        },
        "indexer": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 3306}]}]},
    },
    "nothing that can be left out": SECRET
    | {
        "workers": [],
        "podDisruptionBudgets": False,
        "networkPolicies": {"enabled": False},
        "migrations": {"createFirstKey": False},
        "serviceAccount": {"create": False},
    },
}


class HelmRefused(Exception):
    """Helm refused the chart; the message is what `helm install` would print."""


def render(values: Document, name: str = "mill", namespace: str = "vectors") -> list[Document]:
    """Return all rendered documents, in the order of the templates. Raise HelmRefused."""
    documents: list[Document] = ask_helm(act="render", values=values, name=name, namespace=namespace)[
        "documents"
    ]
    return documents


def lint(values: Document) -> Document:
    report: Document = ask_helm(act="lint", values=values)["report"]
    return report


def ask_helm(**asked: Any) -> Document:
    """Return the answer of tests.helm_program. Raise HelmRefused."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helm_program"],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    answer: Document = json.loads(done.stdout)
    if "refusal" in answer:
        raise HelmRefused(answer["refusal"])
    return answer


def check(document: Document) -> None:
    """Raise ValidationError if a cluster would refuse the document, for example for a misspelt field."""
    kind = document["kind"]
    if kind in CUSTOM["$defs"]:
        jsonschema.Draft202012Validator(CUSTOM | {"$ref": f"#/$defs/{kind}"}).validate(document)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def pick(documents: list[Document], kind: str, name: str) -> Document:
    """Return the only document of this kind whose name ends in `-name`."""
    (found,) = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(f"-{name}")
    ]
    return found


def find_pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield the name and the pod specification of each Deployment and Job."""
    for document in documents:
        if document["kind"] in ("Deployment", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def find_containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]
