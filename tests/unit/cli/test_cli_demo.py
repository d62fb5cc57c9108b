import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.commands import run as run_command
from vectormill import corpus
from vectormill.cli import demos
from vectormill.cli.demo import DemoTask
from vectormill.cli.demos import DEMOS
from vectormill.corpus import Docstring
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.domain.task import EMBED
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.settings import ModelEntry, Settings
from worker.tasks.extract.model.network import load_network

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

    def search(self, name: str, query: str, limit: int, outputs: Any = None) -> list[dict[str, Any]]:
        return [{"key": "json.loads", "score": 0.5}]

    def results(self, make: Any) -> Iterator[dict[str, Any]]:
        for item in self.items:
            if item["key"] not in self.missing:
                yield {"key": item["key"], **make(item)}

    def vectors(self, job_id: str, partial: bool) -> Iterator[dict[str, Any]]:
        return self.results(lambda item: {"embedding": [1.0]})

    def scores(self, job_id: str, partial: bool) -> Iterator[dict[str, Any]]:
        return self.results(lambda item: {"score": 1 / len(item["text_pair"])})

    def records(self, job_id: str, partial: bool) -> Iterator[dict[str, Any]]:
        return self.results(
            lambda item: {"output": [[{"type": "a", "span": item["text"][:2], "offset": [0, 2]}]]}
        )


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
    assert "The model is all-MiniLM-L6-v2, the one of jobs that name no other." in shown.err
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
    stub.missing, stub.state = ("os.fork/own",), "completed"
    assert run("--task", "score", "--api-url", "http://x", "--json") == 1
    shown = capsys.readouterr()
    assert "1 of 4 pairs have no result" in shown.err
    assert json.loads(shown.out)["findings"]["own_scored_higher"] == 1.0
    stub.missing = ("text-2",)
    assert run("--task", "extract", "--api-url", "http://x", "--json") == 1
    shown = capsys.readouterr()
    assert "1 of 10 texts have no result" in shown.err
    assert json.loads(shown.out)["findings"]["records"] == {"a": 9}


def test_the_demo_of_pairs_shows_what_their_scores_tell_apart(
    stub: StubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--task", "score", "--api-url", "http://x") == 0
    shown = capsys.readouterr()
    lines = read_lines(shown.out)
    assert "The model is all-MiniLM-L6-v2, the one of jobs that name no other." in shown.err.splitlines()
    keys = ["json.loads/own", "json.loads/other", "os.fork/own", "os.fork/other"]
    assert [item["key"] for item in stub.items] == keys
    other = "The child gets 0, and the parent the child's number."
    assert stub.items[1] == {"key": "json.loads/other", "text": "Parse JSON", "text_pair": other}
    assert "own rest scored higher 50.0%" in lines
    assert "0.083 Parse JSON Of a string." in lines
    assert lines[-1] == "4 of 4 pairs have their result."


def test_the_demo_of_records_marks_what_was_found_in_the_texts(
    stub: StubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--task", "extract", "--api-url", "http://x", "--items", "3") == 0
    lines = read_lines(capsys.readouterr().out)
    assert "a 3" in lines
    assert "text-1 [居里](a)夫人1867年出生于华沙,1903年与丈夫一起获得诺贝尔物理学奖。" in lines
    assert "人物" in json.loads(stub.asked["extract_schema"])


def test_weights_that_mean_nothing_are_said_to_and_can_be_loaded(tmp_path: Path) -> None:
    demo, settings = DEMOS["extract"], Settings()
    chosen = demos.choose_weights(demo, None, settings, tmp_path)
    assert "random, and the records are meaningless" in chosen.told
    assert chosen.path is not None
    assert load_network(chosen.path, torch.float32, torch.device("cpu")).ffnq.weight.abs().max() > 0
    assert demos.register(settings, chosen)


def test_the_flag_of_the_demo_names_the_tasks_that_have_one() -> None:
    assert set(get_args(DemoTask)) == set(DEMOS)


def test_a_re_index_is_of_vectors_in_a_postgres_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--task", "score"), ("--items", "5"), ("--api-url", "http://localhost:1")):
        assert run("--reindex", *more) == 2
        assert "cannot be combined with --task, --items or --api-url" in capsys.readouterr().err


def test_a_service_that_runs_is_given_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--task", "score", "--api-url", "http://localhost:1", "--model", str(tmp_path)) == 2
    assert "must be a model that is registered" in capsys.readouterr().err


def test_a_directory_of_weights_is_registered_for_the_processes_of_the_demo(tmp_path: Path) -> None:
    demo, settings = DEMOS["score"], Settings(models={"mini": ModelEntry(path="somewhere")})
    model = STRUCTBERT / "model"
    chosen = demos.choose_weights(demo, str(model), settings, tmp_path)
    assert (chosen.model, chosen.path) == ("model", model)
    assert str(model) in chosen.told
    models = json.loads(demos.register(settings, chosen)["VECTORMILL_MODELS"])
    assert models == {"mini": {"path": "somewhere"}, "model": {"path": str(model)}}


def test_without_a_model_pairs_are_scored_by_real_weights_that_are_at_hand(tmp_path: Path) -> None:
    chosen = demos.choose_weights(DEMOS["score"], None, Settings(), tmp_path)
    assert (chosen.model, chosen.path) == (DEFAULT_MODEL, None)
    assert all(word in chosen.told for word in (DEFAULT_MODEL, "cosine", "--model"))
    assert demos.register(Settings(), chosen) == {}


def test_a_model_of_another_task_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="supports the task score"):
        demos.choose_weights(DEMOS[EMBED], str(STRUCTBERT / "model"), Settings(), tmp_path)
    with pytest.raises(UnknownModel):
        demos.choose_weights(DEMOS[EMBED], str(tmp_path / "nothing"), Settings(), tmp_path)
