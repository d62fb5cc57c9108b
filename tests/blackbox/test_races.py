"""The newest write of a key wins, whoever carries it there and whenever it is committed."""

from tests.blackbox.service import DIMENSIONS, Service, assert_close, wait_for


def test_the_job_submitted_last_wins_although_it_is_encoded_first(service: Service, name: str) -> None:
    service.make_collection(name)
    with service.frozen():
        older = service.submit({f"k{n}": f"older {n}" for n in range(300)}, collection=name, priority=9)
        newer = service.submit({f"k{n}": f"newer {n}" for n in range(300)}, collection=name, priority=0)
    for job in (older, newer):
        assert service.wait(job)["state"] == "completed"
    rows = service.rows(name)
    for key, vector in zip(("k3", "k299"), service.embed(["newer 3", "newer 299"]), strict=True):
        assert_close(rows[key], vector)


def test_what_is_deleted_while_a_job_holds_it_does_not_come_back(service: Service, name: str) -> None:
    service.make_collection(name)
    with service.frozen():
        job = service.submit({"gone": "a secret", "stays": "a fact"}, collection=name)
        service.ask("DELETE", f"/v1/collections/{name}/items/gone", 204)
    service.wait(job)
    assert list(service.rows(name)) == ["stays"]


def test_a_job_queued_before_a_change_of_model_is_in_the_new_generation(service: Service, name: str) -> None:
    service.make_collection(name, keep_text=True)
    keys = [f"k{n}" for n in range(100)]
    service.wait(service.submit({key: f"former {key}" for key in keys}, collection=name))
    service.ask("PUT", f"/v1/collections/{name}/source", json={"kind": "own_texts"})
    with service.frozen():
        job = service.submit({key: f"present {key}" for key in keys}, collection=name, priority=9)
        run = service.ask("POST", f"/v1/collections/{name}/runs", 202, json={"options": {"dimensions": 128}})
    assert service.wait(job)["state"] == "completed"
    assert service.wait_for_run(run["id"])["state"] == "completed"
    rows = service.rows(name)
    assert {len(vector) for vector in rows.values()} == {128}
    for key, vector in zip(
        keys[:3], service.embed([f"present {key}" for key in keys[:3]], dimensions=128), strict=True
    ):
        assert_close(rows[key], vector)
    texts = dict(service.sql(f"SELECT key, text FROM {name}"))
    assert texts == {key: f"present {key}" for key in keys}


def test_a_rollback_beside_an_open_job_loses_neither_job_nor_deletion(service: Service, name: str) -> None:
    service.make_collection(name, keep_text=True)
    service.wait(service.submit({"a": "first", "b": "second"}, collection=name))
    service.ask("PUT", f"/v1/collections/{name}/source", json={"kind": "own_texts"})
    run = service.ask("POST", f"/v1/collections/{name}/runs", 202, json={"options": {"dimensions": 128}})
    assert service.wait_for_run(run["id"])["state"] == "completed"
    with service.frozen():
        job = service.submit({"a": "first again", "c": "third"}, collection=name, options={"dimensions": 128})
        service.ask("DELETE", f"/v1/collections/{name}/items/b", 204)
        service.ask("POST", f"/v1/collections/{name}/rollback")
    assert service.wait(job)["state"] == "completed"

    def is_carried() -> bool:
        return sorted(service.rows(name)) == ["a", "c"]

    wait_for(is_carried, "the job is in what was rolled back to, and what was deleted is not")
    rows = service.rows(name)
    assert {len(vector) for vector in rows.values()} == {DIMENSIONS}
    assert_close(rows["a"], service.embed(["first again"])[0])


def test_a_repeated_and_a_changed_put_leave_the_last(service: Service, name: str) -> None:
    service.make_collection(name)
    for n in range(12):
        service.ask("PUT", f"/v1/collections/{name}/items/k", json={"text": f"version {n}"})
    assert_close(service.rows(name)["k"], service.embed(["version 11"])[0])
