"""A backup of a running service becomes another service, which has every row and continues every job."""

from pathlib import Path

from tests.blackbox.service import Service

COUNTS = "SELECT (SELECT count(*) FROM {name}), (SELECT count(*) FROM vectormill.jobs)"


def test_a_restored_service_has_every_row_and_ends_the_open_job(
    service: Service, name: str, program: Path, tmp_path: Path
) -> None:
    texts = {f"k{number}": f"The mill grinds {number} sacks." for number in range(300)}
    service.wait(service.submit(texts, collection=name))
    expected = service.sql(f"SELECT key, embedding::text FROM {name} ORDER BY key")
    dump = tmp_path / "vectormill.dump"
    with service.frozen():
        paused = service.submit({f"later {number}": f"A text of number {number}." for number in range(200)})
        service.run("backup", str(dump))
    restored = Service(program, tmp_path)
    told = restored.run("restore", str(dump), "--data-dir", str(restored.data_dir)).stderr
    assert f"{service.sql('SELECT count(*) FROM vectormill.jobs')[0][0]:,} jobs" in told
    try:
        restored.start()
        assert restored.sql(f"SELECT key, embedding::text FROM {name} ORDER BY key") == expected
        assert restored.wait(paused)["state"] == "completed"
        found = restored.ask(
            "POST", f"/v1/collections/{name}/search", json={"text": "The mill grinds 7 sacks."}
        )
        assert found["data"][0]["key"] == "k7"
        restored.stop()
    finally:
        if restored.process is not None:
            restored.kill()
        restored.http.close()


def test_a_restore_mixes_nothing_and_a_broken_file_leaves_nothing(service: Service, tmp_path: Path) -> None:
    dump = tmp_path / "vectormill.dump"
    service.run("backup", str(dump))
    refused = service.run("restore", str(dump), check=False)
    assert (refused.returncode, "schema vectormill already" in refused.stderr) == (2, True)
    broken = tmp_path / "broken.dump"
    broken.write_bytes(dump.read_bytes()[: dump.stat().st_size // 2])
    directory = str(tmp_path / "new")
    refused = service.run("restore", str(broken), "--data-dir", directory, check=False)
    assert (refused.returncode, "pg_restore failed" in refused.stderr) == (2, True)
    assert "Restored" in service.run("restore", str(dump), "--data-dir", directory).stderr
