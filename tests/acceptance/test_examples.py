"""Every script of `examples/`, run as its docstring says, on one service with small models of their layouts."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack, running_stack
from tests.integration.cli.test_models_command import LAYOUTS
from tests.models import packaged_model

EXAMPLES = Path(__file__).parents[2] / "examples"
HUB_NAMES = ("BAAI/bge-m3", "urchade/gliner_small-v2.1")
NAMES = [name.rpartition("/")[2] for name in HUB_NAMES]


# The arguments of each, and what it prints.
CASES = {
    "scores": ((), r"own rest scored higher: (8\d|9\d|100)\.\d%$"),
    "records": ((NAMES[1],), r"^Marie Curie[\s\S]*\n    [a-z]+: \w[\s\S]*\nrecords: \d+ "),
    "outputs": (
        (NAMES[0],),
        r"\d dimensions, \d+ weights of words, \d+ vectors of tokens(\s+Nearest to: .*(\n\d.*){5}){3}\s*$",
    ),
    "reindexing": (
        (),
        r"^first run: 0 unchanged, 1000 new, 0 changed, .*\n"
        r"changes: 10 another text, 10 other metadata, 10 renamed, 10 deleted, 10 new\n"
        r"after the changes: 960 unchanged, 10 new, 10 changed, 10 metadata_only, 10 moved, 10 deleted, .*\n"
        r"nothing changed: 1000 unchanged, 0 new, .*\n\n"
        r"Nearest to: .*(\n\d.*'module': '(datetime|time|calendar|email)'.*){5}\s*$",
    ),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    models = {"all-MiniLM-L6-v2": {"path": str(packaged_model())}}
    for name, hub_name in zip(NAMES, HUB_NAMES, strict=True):
        models[name] = {"path": str(LAYOUTS[hub_name](folder / name))}
    environment = {"VECTORMILL_MODELS": json.dumps(models), "VECTORMILL_WORKER_PROOF_SECONDS": "1"}
    with running_stack(None, environment, *models) as stack:
        yield stack


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_shows_what_it_says(name: str, service: Stack, tmp_path: Path) -> None:
    arguments, shown = CASES[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        cwd=tmp_path,
        env=service.environment | {"VECTORMILL_API_URL": service.api_url},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout), done.stdout
