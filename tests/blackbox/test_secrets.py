"""No log tells a secret: no key, no password, no secret of a webhook, and no text of a job."""

import json
from urllib.parse import urlsplit

from tests.blackbox.service import MODEL, Json, Service, find_free_port, wait_for

REFUSED = "without a valid key"


def test_no_log_tells_a_secret(service: Service) -> None:
    url = json.loads((service.data_dir / "stack.json").read_text())["database_url"]
    text = "a text that only its job may know"
    key = service.run("keys", "create", "probe", "--scope", "admin").stdout.split("vmk_", 1)[1].split()[0]
    with_key: Json = {"headers": {"Authorization": f"Bearer vmk_{key}"}}
    try:
        wait_for(lambda: service.http.get("/v1/jobs").status_code == 401, "the API knows of the key")
        log = service.data_dir / "logs" / "api.log"
        num_logged = log.read_text("utf-8").count(REFUSED)

        def is_refusal_logged() -> bool:
            """Bring a wrong key; of many refusals in a second only one is logged."""
            service.http.get("/v1/jobs", headers={"Authorization": f"Bearer vmk_{key}wrong"})
            return log.read_text("utf-8").count(REFUSED) > num_logged

        wait_for(is_refusal_logged, "a wrong key is logged")
        service.http.get("/v1/jobs", params={"key": f"vmk_{key}"})
        # A receiver that is away: each attempt is logged.
        webhook = {"url": f"http://127.0.0.1:{find_free_port()}/hook?token=hook-{key}"}
        made = service.ask("POST", "/v1/webhooks", 201, json=webhook, **with_key)
        job = {"model": MODEL, "items": [{"key": "a", "text": text}, {"key": "b", "text": ""}]}
        told = service.ask("POST", "/v1/jobs", 202, json=job, **with_key)
        path = f"/v1/webhooks/{made['id']}/deliveries"
        wait_for(
            lambda: any(each["num_attempts"] for each in service.ask("GET", path, **with_key)["data"]),
            "the receiver is missed",
        )
        wait_for(
            lambda: service.ask("GET", f"/v1/jobs/{told['id']}", **with_key)["finished_at"], "the job ends"
        )
        service.remove(f"/v1/webhooks/{made['id']}", **with_key)
    finally:
        service.run("keys", "revoke", "probe")
        wait_for(lambda: service.http.get("/v1/jobs").status_code == 200, "the API is open again")
    logs = [service.log, *sorted((service.data_dir / "logs").iterdir())]
    assert len(logs) > 5, logs
    password = urlsplit(url).password
    assert password
    assert made["secret"].startswith("whsec_")
    secrets = {"key": key, "password": password, "webhook": made["secret"][len("whsec_") :], "text": text}
    told_by = [
        (log.name, what)
        for log in logs
        for what, secret in secrets.items()
        if secret in log.read_text("utf-8")
    ]
    assert told_by == []
