"""Commands in the folder of somebody else's project: they run, and nothing that lies in that folder is imported."""

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.acceptance.tiny import make_environment
from tests.architecture.sources import PACKAGES
from vectormill.models.registry import find_packaged_model

PROGRAM = Path(sys.executable).parent / "vectormill"
# Modules that Celery, Flower, Python or an ordinary project look for.
LOOKED_FOR = (
    "celeryconfig",
    "flowerconfig",
    "sitecustomize",
    "usercustomize",
    "settings",
    "app",
    "main",
    "django",
)
# What a project with a Celery of its own exports.
VARIABLES = {
    "APP": "app",
    "BROKER_URL": "redis://127.0.0.1:1",
    "CELERY_APP": "app",
    "CELERY_BROKER_URL": "redis://127.0.0.1:1",
    "CELERY_CONFIG_MODULE": "celeryconfig",
    "CELERY_LOADER": "app:Loader",
    "CELERY_RESULT_BACKEND": "redis://127.0.0.1:1",
    "CONFIG_MODULE": "celeryconfig",
    "DJANGO_SETTINGS_MODULE": "settings",
    "LOADER": "app:Loader",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a module of every name that a process of ours could import; each ends its importer."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in {*PACKAGES, *LOOKED_FOR, *sys.stdlib_module_names, *packages_distributions()}:
        code = (
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + '\\n')\nraise SystemExit({name!r})\n"
        )
        (folder / f"{name}.py").write_text(code)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text((folder / f"{name}.py").read_text())
    (folder / ".env").write_text("VECTORMILL_DATABASE_URL=postgresql://127.0.0.1:1/none\n")
    (folder / "alembic.ini").write_text("[alembic]\nscript_location = .\nprepend_sys_path = .\n")
    return folder


def test_nothing_that_lies_in_the_current_folder_is_imported(
    folder: Path, data_dir: Path, tmp_path: Path
) -> None:
    packaged = find_packaged_model()
    assert packaged is not None
    models = {"tiny": write_random_embedder(SMALL, packaged, tmp_path / "tiny")}
    variables = make_environment(tmp_path, models) | VARIABLES
    variables |= {"VECTORMILL_WORKER_DEVICES": "cpu:0", "VECTORMILL_DATA_DIR": str(data_dir)}
    del (
        variables["VECTORMILL_WORKER_BACKEND"],
        variables["VECTORMILL_WORKER_PRECISION"],
    )  # a conversion is a process too
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VECTORMILL_"))
    }
    (folder / "texts.jsonl").write_text(json.dumps({"key": "a", "text": "A text."}) + "\n")

    # It starts servers, API, scheduler, indexer, worker and Flower, converts the model, and completes a job.
    done = subprocess.run(
        [PROGRAM, "encode", "texts.jsonl", "-o", "vectors.jsonl", "--model", "tiny"],
        cwd=folder,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    logs = [log.read_text()[-3000:] for log in [*data_dir.glob("*.log"), *data_dir.glob("logs/*.log")]]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert json.loads((folder / "vectors.jsonl").read_text())["key"] == "a"
