"""Collections: items, searches, sources, schedules, changes of model and the way back."""

import json
import sqlite3
from pathlib import Path

from tests.blackbox.service import DIMENSIONS, MODEL, Service, assert_close, wait_for

DOCUMENTS = {
    "cat": "A cat sleeps on the warm windowsill.",
    "tax": "The tax return is due at the end of May.",
    "ship": "The container ship left the harbour at dawn.",
}


def test_what_is_put_is_found_and_what_is_deleted_is_not(service: Service, name: str) -> None:
    service.make_collection(name, keep_text=True)
    service.wait(service.submit(DOCUMENTS, collection=name))
    for mode in ("vector", "text", "hybrid"):
        body = {"text": "cat", "limit": 2, "mode": mode}
        found = service.ask("POST", f"/v1/collections/{name}/search", json=body)
        assert found["data"][0]["key"] == "cat", mode
    answer = service.ask(
        "PUT", f"/v1/collections/{name}/items/dog", json={"text": "A dog barks at the postman."}
    )
    assert answer["is_searchable"]
    found = service.ask("POST", f"/v1/collections/{name}/search", json={"text": "barking dog", "limit": 1})
    assert found["data"][0]["key"] == "dog"
    service.ask("DELETE", f"/v1/collections/{name}/items/dog", 204)
    service.ask("GET", f"/v1/collections/{name}/items/dog", 404)
    assert sorted(service.rows(name)) == sorted(DOCUMENTS)


def test_a_search_is_answered_while_a_bulk_job_fills_every_slot(service: Service, name: str) -> None:
    service.wait(service.submit(DOCUMENTS, collection=name))
    bulk = service.submit({f"k{n}": f"{name} {n} " + "some words of text " * 20 for n in range(4800)})
    wait_for(lambda: service.ask("GET", f"/v1/jobs/{bulk}")["num_done"] > 0, "the bulk job is under way")
    body = {"text": "a kitten is napping", "limit": 1}
    found = service.ask("POST", f"/v1/collections/{name}/search", json=body)
    assert [match["key"] for match in found["data"]] == ["cat"]
    assert service.ask("GET", f"/v1/jobs/{bulk}")["state"] == "running", "the search waited for the bulk job"
    service.ask("POST", f"/v1/jobs/{bulk}/cancel")
    service.wait(bulk)


def test_the_view_of_a_collection_is_read_by_plain_sql(service: Service, name: str) -> None:
    service.make_collection(name, keep_text=True)
    service.wait(service.submit(DOCUMENTS, collection=name))
    (question,) = service.embed(["a kitten"])
    statement = f"SELECT key, text FROM {name} ORDER BY embedding <=> '{json.dumps(question)}' LIMIT 1"
    assert service.sql(statement) == [("cat", DOCUMENTS["cat"])]
    assert service.sql(f"SELECT vector_dims(embedding::vector) FROM {name} LIMIT 1") == [(DIMENSIONS,)]


def test_a_push_encodes_what_is_new_and_removes_what_is_gone(service: Service, name: str) -> None:
    service.make_collection(name)
    service.ask("PUT", f"/v1/collections/{name}/source", json={"kind": "push"})

    def push(rows: dict[str, str]) -> dict[str, int]:
        lines = "".join(json.dumps({"key": key, "text": text}) + "\n" for key, text in rows.items())
        headers = {"Content-Type": "application/x-ndjson"}
        path = f"/v1/collections/{name}/push?complete=true"
        run = service.ask("POST", path, 202, content=lines, headers=headers)["run"]
        ended = service.wait_for_run(run)
        if ended["state"] == "held":  # so large a share of so small a collection changes
            service.ask("POST", f"/v1/runs/{run}/confirm")
            ended = wait_for(
                lambda: (found := service.ask("GET", f"/v1/runs/{run}"))["finished_at"] and found,
                "the run ends",
            )
        assert ended["state"] == "completed", ended
        counts: dict[str, int] = ended["counts"]
        return counts

    assert push(DOCUMENTS)["num_new"] == 3
    changed = {"cat": DOCUMENTS["cat"], "tax": "The tax return is late.", "car": "A red car."}
    counts = push(changed)
    assert (counts["num_unchanged"], counts["num_changed"], counts["num_new"], counts["num_deleted"]) == (
        1,
        1,
        1,
        1,
    )
    assert sorted(service.rows(name)) == ["car", "cat", "tax"]
    assert_close(service.rows(name)["tax"], service.embed(["The tax return is late."])[0])


def test_a_query_of_another_database_is_followed(service: Service, name: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "source.db") as database:
        database.execute("CREATE TABLE articles (id TEXT, body TEXT, year INTEGER)")
        database.executemany("INSERT INTO articles VALUES (?, ?, 2026)", DOCUMENTS.items())
    address = tmp_path / "address"
    address.write_text(f"sqlite:///{tmp_path / 'source.db'}")
    service.make_collection(name)
    service.run(
        *("sources", "set", name, "--sql", "SELECT id, body, year FROM articles"),
        *("--key", "id", "--text", "body", "--metadata", "year", "--url-file", str(address)),
    )
    service.run("reindex", name, "--wait", "--confirm")
    assert sorted(service.rows(name)) == sorted(DOCUMENTS)
    with sqlite3.connect(tmp_path / "source.db") as database:
        database.execute("DELETE FROM articles WHERE id = 'tax'")
    service.run("reindex", name, "--wait", "--confirm")
    assert sorted(service.rows(name)) == ["cat", "ship"]
    item = service.ask("GET", f"/v1/collections/{name}/items/cat")
    assert item["metadata"] == {"year": 2026}


def test_a_folder_is_indexed_by_a_schedule(service: Service, name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "guide.md").write_text("# Guide\n\nHow to begin.\n\n# End\n\nHow to stop.\n")
    service.make_collection(name)
    service.run("sources", "set", name, "--tree", str(tmp_path), "--split", "paragraphs")
    service.run("schedules", "create", name, "--cron", "0 2 * * *", "--timezone", "Europe/Berlin")
    (schedule,) = [each for each in service.ask("GET", "/v1/schedules")["data"] if each["collection"] == name]
    assert schedule["next_due_at"]
    run = service.ask("POST", f"/v1/schedules/{schedule['name']}/run", 202)
    assert service.wait_for_run(run["id"])["state"] == "completed"
    assert service.rows(name)
    history = service.ask("GET", f"/v1/schedules/{schedule['name']}/runs")["data"]
    assert [each["state"] for each in history] == ["completed"]


def test_another_model_is_built_beside_the_live_one_and_can_be_taken_back(
    service: Service, name: str
) -> None:
    service.make_collection(name, keep_text=True)
    service.wait(service.submit(DOCUMENTS, collection=name))
    service.ask("PUT", f"/v1/collections/{name}/source", json={"kind": "own_texts"})
    run = service.ask("POST", f"/v1/collections/{name}/runs", 202, json={"options": {"dimensions": 128}})
    assert service.wait_for_run(run["id"])["state"] == "completed"
    assert service.ask("GET", f"/v1/collections/{name}")["dimensions"] == 128
    assert {len(vector) for vector in service.rows(name).values()} == {128}
    service.ask("PUT", f"/v1/collections/{name}/items/late", json={"text": "A late train."})
    service.ask("POST", f"/v1/collections/{name}/rollback")
    wait_for(lambda: "late" in service.rows(name), "what was put since is carried back")
    rows = service.rows(name)
    assert {len(vector) for vector in rows.values()} == {DIMENSIONS}
    assert sorted(rows) == sorted([*DOCUMENTS, "late"])
    assert_close(rows["late"], service.embed(["A late train."])[0])


def test_an_index_is_built_on_request_and_answers_as_the_exact_search(service: Service, name: str) -> None:
    texts = {f"k{n}": f"The document about subject {n} of {n * 7 % 13}." for n in range(400)}
    service.wait(service.submit(texts, collection=name))
    question = {"text": "subject 17", "limit": 5}
    exact = service.ask("POST", f"/v1/collections/{name}/search", json=question)["data"]
    service.ask("PUT", f"/v1/collections/{name}/index", 202, json={"policy": "hnsw"})

    def is_built() -> bool:
        indexes = service.ask("GET", f"/v1/collections/{name}")["generations"][0]["indexes"]
        return any(index["method"] == "hnsw" and index["state"] == "ready" for index in indexes)

    wait_for(is_built, "the index is built")
    found = service.ask("POST", f"/v1/collections/{name}/search", json=question)["data"]
    assert found[0]["key"] == exact[0]["key"]


def test_a_batch_of_openai_s_requests_is_answered_line_by_line(service: Service) -> None:
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": MODEL, "input": f"hello {n}"},
        }
        for n in range(5)
    ]
    upload = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = service.ask("POST", "/v1/files", files={"file": ("in.jsonl", upload)}, data={"purpose": "batch"})
    request = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = service.ask("POST", "/v1/batches", json=request)

    def look() -> dict[str, str] | None:
        found: dict[str, str] = service.ask("GET", f"/v1/batches/{batch['id']}")
        return found if found["status"] in ("completed", "failed") else None

    ended = wait_for(look, "the batch ends")
    assert ended["status"] == "completed", ended
    answers = service.read_lines(f"/v1/files/{ended['output_file_id']}/content")
    assert sorted(answer["custom_id"] for answer in answers) == [f"r{n}" for n in range(5)]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert_close(by_id["r3"]["response"]["body"]["data"][0]["embedding"], service.embed(["hello 3"])[0])
