import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.commands import run as run_command
from tests.integration.cli.test_models_command import LAYOUTS
from vectormill import corpus
from vectormill.cli.demo import DemoTask
from vectormill.cli.demos import DEMOS, choose_model, demonstrate_outputs
from vectormill.corpus import Docstring
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.domain.task import EMBED
from vectormill.models.suggestions import SUGGESTIONS
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
    assert "A score is the cosine of two vectors of all-MiniLM-L6-v2." in shown.err
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
    assert "text-2 [La](a)rry Page and Sergey Brin founded Google in California in 1998." in lines
    assert "person" in json.loads(stub.asked["extract_schema"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--task", "extract"),
        ("--outputs", "sparse"),
        ("--outputs", "dense, multi_vector"),
        ("--outputs", "dense,sparse,multi_vector"),
    ],
    ids=" ".join,
)
def test_what_the_packaged_model_lacks_is_refused_at_once_with_the_commands_that_lead_to_the_demo(
    arguments: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Path] = []
    monkeypatch.setattr("vectormill.cli.stack.make_data_dir", begun.append)
    assert run(*arguments, "--data-dir", str(tmp_path / "data")) == 2
    *_, add, again = re.findall("`([^`]+)`", capsys.readouterr().err)
    row = next(row for row in SUGGESTIONS if row.command == add)
    assert shlex.split(again) == ["vectormill", "demo", *arguments, "--model", row.name]
    LAYOUTS[row.hub_name](tmp_path / row.name)
    demo = DEMOS["extract"] if "--task" in arguments else demonstrate_outputs(arguments[1])
    assert choose_model(demo, str(tmp_path / row.name), Settings())[0] == row.name
    assert begun == []


def test_a_demo_of_what_no_model_computes_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--outputs", "sparse,both") == 2
    assert capsys.readouterr().err.rstrip().endswith("separated by commas; got 'sparse,both'.")


def test_dense_vectors_alone_are_the_demo_of_vectors_whatever_else_the_model_computes(tmp_path: Path) -> None:
    assert demonstrate_outputs(" dense") is DEMOS[EMBED]
    colbert = LAYOUTS["colbert-ir/colbertv2.0"](tmp_path)
    with pytest.raises(InvalidOption, match="outputs must be some of multi_vector"):
        choose_model(DEMOS[EMBED], str(colbert), Settings())


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
    model, settings = (
        STRUCTBERT / "model",
        Settings(models={"mini": ModelEntry("somewhere")}, data_dir=tmp_path),
    )
    name, variables = choose_model(DEMOS["score"], str(model), settings)
    assert name == "model"
    models = json.loads(variables["VECTORMILL_MODELS"])
    assert models == {"mini": {"path": "somewhere"}, "model": {"path": str(model)}}


def test_the_processes_of_the_demo_know_a_model_that_models_add_has_registered(tmp_path: Path) -> None:
    added = {"mine": {"path": str(STRUCTBERT / "model"), "max_tokens": 32}}
    (tmp_path / "models.json").write_text(json.dumps(added))
    name, variables = choose_model(DEMOS["score"], "mine", Settings(data_dir=tmp_path))
    assert name == "mine"
    assert json.loads(variables["VECTORMILL_MODELS"]) == added


@pytest.mark.parametrize("task", [EMBED, "score"])
def test_without_a_model_the_packaged_one_is_used(task: str) -> None:
    assert choose_model(DEMOS[task], None, Settings()) == (None, {})


def test_a_model_of_another_task_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="supports the task score"):
        choose_model(DEMOS[EMBED], str(STRUCTBERT / "model"), Settings())
    with pytest.raises(UnknownModel):
        choose_model(DEMOS[EMBED], str(tmp_path / "nothing"), Settings())
