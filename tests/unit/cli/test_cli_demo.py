import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run as run_command
from vectormill import corpus
from vectormill.cli.demo import choose_model
from vectormill.corpus import Docstring
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.models.registry import find_packaged_model
from vectormill.settings import ModelEntry, Settings

STRUCTBERT = Path(__file__).parents[2] / "data" / "structbert"
TEXTS = [
    Docstring("json.loads", "Parse JSON. Of a string."),
    Docstring("os.fork", "Fork. The child gets 0, and the parent the child's number."),
]
ENDED: Mapping[str, Any] = {
    "id": "job-1", "model": "mini", "num_failed": 0, "num_tokens": 12, "truncated_items": 0, "num_passages": 0,
    "padding_waste": 0.125, "options": {}, "created_at": "2026-11-01T02:00:00Z", "finished_at": "2026-11-01T02:00:05Z",
    "bound_by": {"value": "run", "reason": "the model"},
}  # fmt: skip


class StubClient:
    """A service on which a job is over at once; results of these keys are missing."""

    def __init__(self, *missing: str, state: str = "completed") -> None:
        self.missing, self.state, self.asked = missing, state, dict[str, Any]()
        self.items: list[dict[str, Any]] = []

    def __enter__(self) -> "StubClient":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, items: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
        self.items, self.asked = items, asked
        return {**ENDED, "state": "queued", "num_items": len(items), "num_done": 0}

    def wait(self, job_id: str, look: Any, **_: Any) -> dict[str, Any]:
        done = len(self.items) - len(self.missing)
        return {**ENDED, "state": self.state, "num_items": len(self.items), "num_done": done}

    def workers(self) -> list[dict[str, Any]]:
        return [{"model": "mini", "report": {"device": {"value": "cpu:0", "reason": "the only one"}}}]

    def search(self, name: str, query: str, limit: int) -> list[dict[str, Any]]:
        return [{"key": "json.loads", "score": 0.5}]

    def vectors(self, job_id: str, partial: bool) -> Iterator[dict[str, Any]]:
        for item in self.items:
            if item["key"] not in self.missing:
                yield {"key": item["key"], "embedding": [1.0]}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubClient:
    client = StubClient()
    monkeypatch.setattr(
        corpus, "read_docstrings", lambda: iter([*TEXTS, Docstring("alone", "One sentence.")])
    )
    monkeypatch.setattr("vectormill.client.Client", lambda url: client)
    return client


run = partial(run_command, "demo")


def read_lines(text: str) -> list[str]:
    """Return the lines as words: columns are padded."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_demo_ends_with_figures_reasons_and_three_searches(
    stub: StubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--api-url", "http://x") == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("Next: `vectormill submit FILE ")
    lines = read_lines(shown.out)
    assert "items 3" in lines
    assert "seconds 5.0 from the submission to the last commit" in lines
    assert "padding waste 12.5% share of the computed tokens that were padding" in lines
    assert "bottleneck run the model" in lines
    assert "model mini the default" in lines
    assert "device cpu:0 the only one" in lines
    assert lines.count("0.500 json.loads Parse JSON. Of a string.") == 3
    assert lines[-1] == "3 of 3 texts have their vector."
    assert stub.asked["collection"] == "docstrings"
    assert run("--api-url", "http://x", "--json", "--items", "2") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_vectors"], len(report["searches"])) == (2, 3)
    assert report["summary"]["device"] == {"value": "cpu:0", "reason": "the only one"}


def test_a_demo_counts_results_instead_of_trusting_the_state(
    stub: StubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.missing = ("os.fork",)
    assert run("--api-url", "http://x") == 1
    assert "1 of 3 texts have no vector" in capsys.readouterr().err
    stub.missing, stub.state = ("json.loads", "os.fork", "alone"), "failed"
    assert run("--api-url", "http://x", "--json") == 4
    shown = capsys.readouterr()
    assert "job job-1 failed" in shown.err
    assert json.loads(shown.out)["searches"] == {}


def test_a_service_that_runs_is_given_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--api-url", "http://localhost:1", "--model", str(tmp_path)) == 2
    assert "must be a model that is registered" in capsys.readouterr().err


def test_a_directory_of_weights_is_registered_for_the_processes_of_the_demo(tmp_path: Path) -> None:
    model = find_packaged_model()
    assert model is not None
    name, variables = choose_model(
        str(model), Settings(models={"mini": ModelEntry("somewhere")}, data_dir=tmp_path)
    )
    assert name == model.name
    models = json.loads(variables["VECTORMILL_MODELS"])
    assert models == {"mini": {"path": "somewhere"}, name: {"path": str(model)}}


def test_the_processes_of_the_demo_know_a_model_that_models_add_has_registered(tmp_path: Path) -> None:
    added = {"mine": {"path": str(find_packaged_model()), "max_tokens": 32}}
    (tmp_path / "models.json").write_text(json.dumps(added))
    name, variables = choose_model("mine", Settings(data_dir=tmp_path))
    assert name == "mine"
    assert json.loads(variables["VECTORMILL_MODELS"]) == added


def test_without_a_model_the_packaged_one_is_used() -> None:
    assert choose_model(None, Settings()) == (None, {})


def test_a_model_without_dense_vectors_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="supports the task score"):
        choose_model(str(STRUCTBERT / "model"), Settings())
    with pytest.raises(UnknownModel):
        choose_model(str(tmp_path / "nothing"), Settings())
