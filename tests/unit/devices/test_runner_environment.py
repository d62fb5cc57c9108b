"""The process that reads foreign models knows no password: what it loads could otherwise reach every job."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_engine import CARD
from vectormill.settings import SECRET_VARIABLES
from worker.devices.device import CPU, Device
from worker.encoder.encoder import EncoderOrder
from worker.runner import starter
from worker.runner.starter import RunnerStarter

DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)


# Names of things that are no secrets, as models, their libraries and their devices have them.
KEPT = {
    "PATH": "/bin",
    "HF_HOME": "/hub",
    "HF_ENDPOINT": "https://hub.example.com:8443/",
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_SOCKET_IFNAME": "eth0",
    "LD_LIBRARY_PATH": "/opt/lib:/usr/lib",
    "PWD": "/srv",
    "SOME_MAIL": "somebody@example.com",
}
# Of services that the worker speaks to, or that share its environment, by their names or by their values.
SECRETS = {
    **dict.fromkeys(SECRET_VARIABLES, "moonshine"),
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "TOKENS"), "moonshine"),
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"), "moonshine"),
    **dict.fromkeys(("PGPASSWORD", "SMTP_PASSWD", "REDISCLI_AUTH", "SSH_AUTH_SOCK"), "moonshine"),
    **dict.fromkeys(("GOOGLE_APPLICATION_CREDENTIALS", "secret_of_ours"), "moonshine"),
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer moonshine",
    "SOURCE_OF_TEXTS": "postgresql://reader:moonshine@db/texts",
    "CACHE": "redis://:moonshine/@cache:6379/0",
    "HTTPS_PROXY": "http://me:moonshine@proxy:3128",
    "SENTINELS": "redis://a:1,redis://:moonshine@b:2",
    "CONNECTION": "host=db user=me password=moonshine",
    "PLACE": "postgresql:///texts?host=db&password=moonshine",
}


def test_the_model_process_gets_no_secret_and_everything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: seen.append(environment))
    order: Any = EncoderOrder(CARD, replace(DEVICE), "auto", "auto", 1, tmp_path)
    RunnerStarter("module:function", order, SECRETS | KEPT, collective_timeout_seconds=1).start()
    assert {name for name in SECRETS if name in seen[0]} == set()
    assert {name: seen[0][name] for name in KEPT} == KEPT
