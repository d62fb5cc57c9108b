"""Health, metrics, models and the API's own description."""

import re
from pathlib import Path
from uuid import uuid4

import httpx
from sqlalchemy import Engine, event

from tests.api_server import ITEMS, api_client, submit
from vectormill.db.session import make_engine
from vectormill.workers.workers import beat_indexer, beat_scheduler, beat_worker

MODEL = "all-MiniLM-L6-v2"
NO_REDIS = "redis://127.0.0.1:1/0"
API_SETTINGS = {"redis_url": NO_REDIS}


def start_others(engine: Engine) -> None:
    with engine.begin() as connection:
        beat_worker(connection, "enc-cpu@here", uuid4(), MODEL, 3, {"device": "cpu", "precision": "fp32"})
        beat_scheduler(connection)
        beat_indexer(connection)


NO_SCHEDULES = {"schedules": 0, "paused": 0, "failing": 0, "overdue": 0}


def test_ready_says_who_is_there(engine: Engine, redis_url: str) -> None:
    start_others(engine)
    with api_client(engine, redis_url=redis_url) as client:
        answer = client.get("/readyz")
        assert client.get("/livez").json() == {"status": "ok"}
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "postgres": True,
        "redis": True,
        "workers": 1,
        "failing_workers": 0,
        "scheduler": True,
        "indexer": True,
        "schedules": NO_SCHEDULES,
    }


def test_without_redis_the_api_is_degraded_but_ready_and_takes_jobs(client: httpx.Client) -> None:
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "degraded",
        "postgres": True,
        "redis": False,
        "workers": 0,
        "failing_workers": 0,
        "scheduler": False,
        "indexer": False,
        "schedules": NO_SCHEDULES,
    }
    assert submit(client, ITEMS)["state"] == "queued"


def test_without_postgres_the_api_lives_but_is_not_ready() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    with api_client(engine) as client:
        answer = client.get("/readyz")
        assert client.get("/livez").status_code == 200
        assert "vectormill_database_up 0.0" in client.get("/metrics").text
    engine.dispose()
    assert answer.status_code == 503
    assert (answer.json()["status"], answer.json()["postgres"]) == ("unavailable", False)


def test_metrics_count_by_route_template_and_show_the_backlog(client: httpx.Client, engine: Engine) -> None:
    start_others(engine)
    job = submit(client, ITEMS)
    client.get(f"/v1/jobs/{job['id']}")
    client.post(f"/v1/jobs/{submit(client, ITEMS)['id']}/pause")
    client.get("/nothing")
    text = client.get("/metrics").text
    assert job["id"] not in text
    for line in (
        'vectormill_http_requests_total{method="POST",route="/v1/jobs",status="202"} 2.0',
        'vectormill_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="200"} 1.0',
        'vectormill_http_requests_total{method="GET",route="unmatched",status="404"} 1.0',
        'vectormill_http_request_seconds_count{method="POST",route="/v1/jobs"} 2.0',
        "vectormill_submitted_jobs_total 2.0",
        "vectormill_submitted_items_total 4.0",
        f'vectormill_chunks{{model="{MODEL}",state="pending"}} 2.0',
        f'vectormill_jobs{{model="{MODEL}",state="queued"}} 1.0',
        f'vectormill_jobs{{model="{MODEL}",state="paused"}} 1.0',
        f'vectormill_queue_waiting_chunks{{model="{MODEL}",priority="5"}} 1.0',
        f'vectormill_queue_leased_chunks{{model="{MODEL}",priority="5"}} 0.0',
        f'vectormill_queue_items{{model="{MODEL}",priority="5"}} 2.0',
        f'vectormill_workers{{model="{MODEL}"}} 1.0',
        "vectormill_database_up 1.0",
    ):
        assert line in text.splitlines()
    (oldest,) = re.findall(
        rf'^vectormill_queue_oldest_seconds{{model="{MODEL}",priority="5"}} (.+)$', text, re.MULTILINE
    )
    assert 0 < float(oldest) < 3600


def test_metrics_tell_who_gives_signs_of_life_and_whether_redis_can_be_used(
    client: httpx.Client, engine: Engine
) -> None:
    def ask() -> list[str]:
        lines = client.get("/metrics").text.splitlines()
        return [
            line for line in lines if line.startswith(("vectormill_process_alive", "vectormill_redis_usable"))
        ]

    silent = [
        'vectormill_process_alive{process="scheduler"} 0.0',
        'vectormill_process_alive{process="indexer"} 0.0',
    ]
    assert ask() == [*silent, "vectormill_redis_usable 1.0"]
    with engine.begin() as connection:
        beat_scheduler(connection, is_redis_away=True)
    assert ask() == [
        'vectormill_process_alive{process="scheduler"} 1.0',
        silent[1],
        "vectormill_redis_usable 0.0",
    ]


def test_metrics_show_what_workers_report_of_themselves(client: httpx.Client, engine: Engine) -> None:
    report = {
        "device": {"value": "cuda:0", "reason": "requested"},
        "stage_seconds": {"run": 9.5, "persist": 1.0},
        "num_tokens": 970,
        "num_computed_tokens": 1000,
        "num_reused": 7,
        "num_sequences": 40,
        "num_words": 100,
        "num_known_words": 90,
        "num_restarts": 1,
        "chunk_outcomes": {"done": 5, "lease lost": 2},
        "num_redispatched_chunks": 3,
        "num_stale_completions": 1,
        "dispatch_seconds": {"bounds": [0.5, 1], "counts": [4, 2, 1], "sum": 9.0},
        "device_memory_used_bytes": 3 << 30,
        "device_memory_total_bytes": None,  # the driver did not say
    }
    uses = [
        {"name": "cuda:0", "memory_used_bytes": 1, "memory_total_bytes": 8, "utilisation": 0.9},
        {"name": "cuda:1", "memory_used_bytes": 2, "memory_total_bytes": 8, "utilisation": None},
    ]
    shared = {"device": {"value": "cuda:0, cuda:1"}, "devices": uses, "device_memory_used_bytes": 2}
    with engine.begin() as connection:
        beat_worker(connection, "enc-cuda0@here", uuid4(), MODEL, 3, report)
        beat_worker(connection, "tensor@here", uuid4(), MODEL, 3, shared)
        beat_worker(connection, "old-cpu@here", uuid4(), MODEL, 3, {"device": "cpu"})  # of an older release
    lines = client.get("/metrics").text.splitlines()
    who = f'model="{MODEL}",worker="enc-cuda0@here"'
    for line in (
        f'vectormill_stage_seconds_total{{model="{MODEL}",stage="run",worker="enc-cuda0@here"}} 9.5',
        f"vectormill_computed_tokens_total{{{who}}} 1000.0",
        f"vectormill_padding_tokens_total{{{who}}} 30.0",
        f"vectormill_reused_texts_total{{{who}}} 7.0",
        f"vectormill_computed_sequences_total{{{who}}} 40.0",
        f"vectormill_words_total{{{who}}} 100.0",
        f"vectormill_known_words_total{{{who}}} 90.0",
        f"vectormill_runner_restarts_total{{{who}}} 1.0",
        f'vectormill_chunk_outcomes_total{{model="{MODEL}",outcome="lease lost",worker="enc-cuda0@here"}} 2.0',
        f"vectormill_redispatched_chunks_total{{{who}}} 3.0",
        f"vectormill_stale_completions_total{{{who}}} 1.0",
        f'vectormill_dispatch_lag_seconds_bucket{{le="0.5",model="{MODEL}",worker="enc-cuda0@here"}} 4.0',
        f'vectormill_dispatch_lag_seconds_bucket{{le="1.0",model="{MODEL}",worker="enc-cuda0@here"}} 6.0',
        f'vectormill_dispatch_lag_seconds_bucket{{le="+Inf",model="{MODEL}",worker="enc-cuda0@here"}} 7.0',
        f"vectormill_dispatch_lag_seconds_sum{{{who}}} 9.0",
        'vectormill_device_memory_used_bytes{device="cuda:0",worker="enc-cuda0@here"} 3.221225472e+09',
        'vectormill_device_memory_used_bytes{device="cuda:0",worker="tensor@here"} 1.0',
        'vectormill_device_memory_used_bytes{device="cuda:1",worker="tensor@here"} 2.0',
        'vectormill_device_utilisation{device="cuda:0",worker="tensor@here"} 0.9',
        f'vectormill_workers{{model="{MODEL}"}} 3.0',
    ):
        assert line in lines
    assert not any('bytes{device="cuda:0",worker="enc' in line and "total" in line for line in lines)
    assert sum(line.startswith("vectormill_device_utilisation{") for line in lines) == 1
    assert not any("old-cpu" in line for line in lines)


def test_models_say_what_they_are_and_who_serves_them(engine: Engine, tmp_path: Path) -> None:
    start_others(engine)
    with api_client(engine, models={"broken": {"path": str(tmp_path)}}) as client:
        packaged, broken = client.get("/v1/models").json()["data"]
        (worker,) = client.get("/v1/workers").json()["data"]
    assert (packaged["name"], packaged["dimension"], packaged["max_tokens"]) == (MODEL, 384, 256)
    assert (packaged["pooling"], packaged["normalize"], packaged["workers"]) == ("mean", True, 1)
    assert packaged["revision"]
    assert packaged["problem"] is None
    assert (broken["name"], broken["dimension"]) == ("broken", None)
    assert "config.json" in broken["problem"]
    assert (worker["name"], worker["model"], worker["report"]["device"]) == ("enc-cpu@here", MODEL, "cpu")


def test_probes_and_the_list_of_models_leave_reports_of_workers_where_they_are(
    client: httpx.Client, engine: Engine
) -> None:
    start_others(engine)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert client.get("/readyz").json()["workers"] == 1
    assert client.get("/v1/models").json()["data"][0]["workers"] == 1
    assert any("vectormill.workers" in statement for statement in statements)
    assert not any("report" in statement for statement in statements)
