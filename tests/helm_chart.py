"""The chart rendered as Helm would, without a cluster: documents by kind and name, and checks against schemas."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import helm_python
import jsonschema
import kubernetes_validate
import yaml

# Helm is a library of Go, whose runtime takes over the handling of signals when it is loaded. As Python has it, a write
# to somebody who has gone is an error and ends no process.
signal.signal(signal.SIGPIPE, signal.SIG_IGN)

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy/helm/vectormill"
CUSTOM: Final = json.loads((ROOT / "tests/schemas/custom-resources.json").read_text(encoding="utf-8"))
# Of the oldest Kubernetes that Chart.yaml allows, and of the newest whose schemas there are.
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


def render(values: Document, name: str = "mill", namespace: str = "vectors") -> list[Document]:
    """Every document, in the order of the templates. Raises HelmError, whose words are what `helm install` says."""
    with helm_python.Chart.load(CHART) as chart:
        manifests = chart.render(values, name=name, namespace=namespace)
    return [
        document
        for path, text in sorted(manifests.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def check(document: Document) -> None:
    """Raises ValidationError for what a cluster would refuse, a misspelt member included."""
    kind = document["kind"]
    if kind in CUSTOM["$defs"]:
        jsonschema.Draft202012Validator(CUSTOM | {"$ref": f"#/$defs/{kind}"}).validate(document)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def pick(documents: list[Document], kind: str, name: str) -> Document:
    """The one of this kind whose name ends so."""
    (found,) = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(f"-{name}")
    ]
    return found


def find_pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Name and spec of each pod that they make."""
    for document in documents:
        if document["kind"] in ("Deployment", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def find_containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]
