import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.unit.fake_api import FakeApi, serving_fake_api
from vectormill import corpus
from vectormill.cli import demos as weights
from vectormill.cli.app import main
from vectormill.cli.demo import DemoTask
from vectormill.cli.demos import DEMOS
from vectormill.corpus import Docstring
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.domain.task import EMBED
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.settings import ModelEntry, Settings
from worker.tasks.extract.model.network import load_network

STRUCTBERT = Path(__file__).parents[2] / "data" / "structbert"
TEXTS = [Docstring("json.loads", "Parse JSON.\n\nMore."), Docstring("os.fork", "Fork.")]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(corpus, "read_docstrings", lambda: iter(TEXTS))
    with serving_fake_api() as fake:
        yield fake


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_the_demo_ends_with_figures_reasons_and_three_searches(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", "--api-url", api.url) == 0
    # Columns are padded: compared as words.
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "items 2" in lines
    assert "seconds 5.0 from the submission to the last commit" in lines
    assert "padding waste 12.5% share of the computed tokens that were padding" in lines
    assert "bound by run the model: the device was computing in 90% of the time" in lines
    assert "model mini the default" in lines
    assert "backend openvino the faster backend on CPUs" in lines
    assert "Nearest to: how to parse a date" in lines
    assert lines.count("0.500 json.loads Parse JSON.") == 3
    assert lines[-1] == "2 of 2 texts have their vector."
    assert api.jobs["job-1"]["collection"] == "docstrings"


def test_the_demo_prints_json_for_machines(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--api-url", api.url, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_vectors"] == 2
    assert report["summary"]["device"] == {"value": "cpu:0", "reason": "there is no accelerator"}
    assert len(report["searches"]) == 3


def test_the_demo_counts_the_vectors_instead_of_trusting_the_state(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.missing_vectors = {"os.fork"}
    assert run("demo", "--api-url", api.url) == 1
    assert "1 of 2 texts have no vector" in capsys.readouterr().err


def test_a_demo_whose_job_fails_says_so_without_searching(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.final_state = "failed"
    api.missing_vectors = {"json.loads", "os.fork"}
    assert run("demo", "--api-url", api.url) == 4
    assert "job job-1 failed" in capsys.readouterr().err
    assert not [path for _, path, _ in api.requests if "search" in path]


PAIRS = [
    Docstring("json.loads", "Parse JSON. Of a string."),
    Docstring("os.fork", "Fork. The child gets 0, and the parent the child's number."),
]


def test_the_demo_of_pairs_shows_what_their_scores_tell_apart(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        corpus, "read_docstrings", lambda: iter([*PAIRS, Docstring("alone", "One sentence.")])
    )
    assert run("demo", "--task", "score", "--api-url", api.url) == 0
    shown = capsys.readouterr()
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "The weights are those of the service's default model." in shown.err.splitlines()
    assert [item["key"] for item in api.items["job-1"]] == [
        "json.loads/own",
        "json.loads/other",
        "os.fork/own",
        "os.fork/other",
    ]
    assert api.items["job-1"][1] == {
        "key": "json.loads/other",
        "text": "Parse JSON",
        "text_pair": "The child gets 0, and the parent the child's number.",
    }
    assert "own rest scored higher 50.0%" in lines
    assert "0.083 Parse JSON Of a string." in lines
    assert lines[-1] == "4 of 4 pairs have their result."
    assert [path for method, path, parameters in api.requests if parameters.get("task") == "score"]


def test_the_demo_of_pairs_counts_scores_and_prints_json_for_machines(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "read_docstrings", lambda: iter(PAIRS))
    api.missing_vectors = {"os.fork/own"}
    assert run("demo", "--task", "score", "--api-url", api.url, "--json") == 1
    shown = capsys.readouterr()
    assert "1 of 4 pairs have no result" in shown.err
    report = json.loads(shown.out)
    assert report["num_results"] == 3
    assert report["findings"]["own_scored_higher"] == 1.0


def test_the_demo_of_records_marks_what_was_found_in_the_texts(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", "--task", "extract", "--api-url", api.url, "--items", "3") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "a 3" in lines
    assert "text-1 [居里](a)夫人1867年出生于华沙,1903年与丈夫一起获得诺贝尔物理学奖。" in lines
    assert lines[-1] == "3 of 3 texts have their result."
    (parameters,) = [given for _, _, given in api.requests if given.get("task") == "extract"]
    assert "人物" in json.loads(parameters["extract_schema"])


def test_the_demo_of_records_counts_them_and_prints_json_for_machines(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.missing_vectors = {"text-2"}
    assert run("demo", "--task", "extract", "--api-url", api.url, "--json") == 1
    shown = capsys.readouterr()
    assert "1 of 10 texts have no result" in shown.err
    assert json.loads(shown.out)["findings"]["records"] == {"a": 9}


def test_weights_that_mean_nothing_are_said_to_and_can_be_loaded(tmp_path: Path) -> None:
    demo, settings = DEMOS["extract"], Settings()
    chosen = weights.choose_weights(demo, None, settings, tmp_path)
    assert "random, and the records mean nothing" in chosen.told
    assert chosen.path is not None
    assert load_network(chosen.path, torch.float32, torch.device("cpu")).ffnq.weight.abs().max() > 0
    assert weights.register(settings, chosen)


def test_a_model_that_embeds_extracts_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption):
        weights.choose_weights(DEMOS["extract"], DEFAULT_MODEL, Settings(), tmp_path)


def test_the_flag_of_the_demo_names_the_tasks_that_have_one() -> None:
    assert set(get_args(DemoTask)) == set(DEMOS)


def test_a_re_index_is_of_vectors_in_a_postgres_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--task", "score"), ("--items", "5"), ("--api-url", "http://localhost:1")):
        assert run("demo", "--reindex", *more) == 2
        assert "leave --task, --items and --api-url out" in capsys.readouterr().err


def test_a_service_that_runs_is_given_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", "--task", "score", "--api-url", "http://localhost:1", "--model", str(tmp_path)) == 2
    assert "must be a model that is registered" in capsys.readouterr().err


def test_a_directory_of_weights_is_registered_for_the_processes_of_the_demo(tmp_path: Path) -> None:
    demo, settings = DEMOS["score"], Settings(models={"mini": ModelEntry(path="somewhere")})
    model = STRUCTBERT / "model"
    chosen = weights.choose_weights(demo, str(model), settings, tmp_path)
    assert (chosen.model, chosen.path) == ("model", model)
    assert str(model) in chosen.told
    models = json.loads(weights.register(settings, chosen)["VECTORMILL_MODELS"])
    assert models == {"mini": {"path": "somewhere"}, "model": {"path": str(model)}}


def test_without_a_model_pairs_are_scored_by_real_weights_that_are_at_hand(tmp_path: Path) -> None:
    chosen = weights.choose_weights(DEMOS["score"], None, Settings(), tmp_path)
    assert (chosen.model, chosen.path) == (DEFAULT_MODEL, None)
    assert all(word in chosen.told for word in ("real", "cosine", "--model"))
    assert weights.register(Settings(), chosen) == {}


def test_a_model_of_another_task_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="supports the task score"):
        weights.choose_weights(DEMOS[EMBED], str(STRUCTBERT / "model"), Settings(), tmp_path)
    with pytest.raises(UnknownModel):
        weights.choose_weights(DEMOS[EMBED], str(tmp_path / "nothing"), Settings(), tmp_path)
