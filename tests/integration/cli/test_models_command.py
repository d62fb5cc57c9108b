"""`vectormill models add` and `remove`: what is checked, converted, certified, and known to the API afterwards."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import Engine

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.adapters import ADAPTER, write_adapted
from tests.api_server import api_client
from tests.classifiers import write_classifier
from tests.commands import run
from tests.gliner_models import GOLDEN as GLINER
from tests.integration.certificates.test_certify import compute_references_here
from tests.models import packaged_model, write_transformer
from tests.representations import write_stanford_colbert
from tests.static_models import write_static
from tests.unit.deployment.test_hub import COMMIT, serving_hub
from tests.unit.deployment.test_registry import write_model
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.domain.task import DENSE, EXTRACT, JUDGE, OUTPUTS, TASKS
from vectormill.models.registry import DEFAULT_MODEL, Registry, make_spec
from vectormill.models.suggestions import SUGGESTIONS, Suggestion, find_need
from vectormill.settings import ModelEntry

TESTS = Path(__file__).parents[2]
# Without torch a model is registered and not loaded, which would import torch in two further processes.
COMMAND: Final = (sys.executable, "-m", "vectormill.cli")
WITHOUT_TORCH: Final = (
    sys.executable, "-c", "import sys; sys.modules['torch'] = None; from vectormill.cli.app import main; main()",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("VECTORMILL_WORKER_DEVICES", "cpu")
    monkeypatch.setenv("VECTORMILL_WORKER_THREADS", "1")  # two wait for each other longer than they compute


def read_names(tmp_path: Path) -> dict[str, dict[str, str]]:
    file = tmp_path / "data" / "models.json"
    entries: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    return entries


def run_with_hub(
    argv: Sequence[str], home: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, since huggingface_hub reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**kept, **environment, "HF_HOME": str(home), "HF_TOKEN": "hf_secret"}
    return subprocess.run(argv, env=variables, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_directory_is_loaded_converted_certified_and_known_to_a_running_api_until_it_is_removed(
    tmp_path: Path, engine: Engine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_transformer(tmp_path / "tiny", "Bert")
    compute_references_here(monkeypatch)
    add = ("models", "add", str(tiny), "--pooling", "mean", "--max-tokens", "32", "--name")
    with api_client(engine, data_dir=tmp_path / "data") as client:
        refused = client.post("/v1/jobs", json={"model": "mine", "items": [{"key": "a", "text": "one"}]})
        assert "`vectormill models add NAME|PATH`" in refused.json()["detail"]
        with monkeypatch.context() as strict:
            strict.setattr("worker.certificates.measuring.find_promise", lambda *_: 1.1)
            assert run(*add, "mine", "--certify") == 1
        assert "below the promised 1.1" in capfd.readouterr().err
        assert read_names(tmp_path) == {}
        assert run(*add, "mine", "--certify", "--json") == 0
        said = capfd.readouterr()
        added = json.loads(said.out)
        assert added["report"]["backend"]["value"] == "openvino"
        assert (added["dimension"], added["max_tokens"]) == (32, 32)
        assert read_names(tmp_path) == {
            "mine": {"path": str(tiny.resolve()), "pooling": "mean", "max_tokens": 32}
        }
        assert "vectormill worker --model mine" in said.err
        assert len(list((tmp_path / "cache" / "openvino").glob("*/network.json"))) == 1
        assert (tmp_path / "data" / "certificates").is_dir()
        model = client.get("/v1/models/mine").json()
        assert (model["dimension"], model["max_tokens"], model["problem"]) == (32, 32, None)
        monkeypatch.setenv("VECTORMILL_API_URL", str(client.base_url))
        for command in (("models",), ("models", "list")):
            assert run(*command) == 0
            assert "mine\tembed\tdense\t32" in capfd.readouterr().out
        assert run("models", "add", "mine") == 0, "one that is registered is prepared again"
        for name in ("mine", "all-MiniLM-L6-v2"):
            assert run(*add, name, "--normalize") == 2
            assert "is registered already with other options or files" in capfd.readouterr().err, name
        assert read_names(tmp_path).keys() == {"mine"}
        assert run("models", "remove", "mine") == 0
        assert client.get("/v1/models/mine").status_code == 404
    assert run("models", "remove", "mine") == 2
    monkeypatch.setenv("VECTORMILL_MODELS", json.dumps({"mine": {"path": str(tiny)}}))
    assert run(*add, "mine") == 2
    assert "VECTORMILL_MODELS has a model 'mine'" in capfd.readouterr().err


def test_of_two_commands_that_add_one_name_at_once_the_later_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_static(tmp_path / name, normalize=True) for name in ("first", "second"))
    codes: list[int] = []

    def load(*_: object) -> None:  # which takes minutes; another command runs meanwhile
        if not codes:
            codes.append(-1)
            codes.append(run("models", "add", str(second), "--name", "mine"))

    monkeypatch.setattr("vectormill.cli.models.try_to_load", load)
    codes.append(run("models", "add", str(first), "--name", "mine"))
    assert codes == [-1, 0, 2]
    assert "is registered already" in capfd.readouterr().err
    assert read_names(tmp_path) == {"mine": {"path": str(second.resolve())}}


def test_options_before_the_name_of_a_command_are_refused_and_not_ignored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "--data-dir", str(tmp_path / "wanted"), "remove", "mine") == 2
    said = capfd.readouterr().err
    assert "--data-dir" in said
    assert "Write it after remove" in said


def test_models_that_cannot_run_are_refused_and_not_registered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generative = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "hidden_size": 4}
    bare = write_model(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    for directory, words in (
        (write_model(tmp_path / "gpt2", config=generative), "GPT2LMHeadModel"),
        (bare, "no weights"),
        (write_model(tmp_path / "hollow"), "no num_attention_heads"),
        (tmp_path / "missing", "does not exist here"),
    ):
        assert run("models", "add", str(directory)) in (2, 3)
        assert words in capfd.readouterr().err, directory
    assert read_names(tmp_path) == {}


def test_a_model_of_the_hub_is_registered_at_its_commit_and_without_a_network_it_is_said_what_to_do(
    tmp_path: Path,
) -> None:
    def add(
        environment: Mapping[str, str], *arguments: str, model: str = "some-org/some-model"
    ) -> subprocess.CompletedProcess[str]:
        return run_with_hub(
            [*WITHOUT_TORCH, "models", "add", model, *arguments], tmp_path / "home", environment
        )

    offline = add({"HF_ENDPOINT": "http://127.0.0.1:1"})
    assert offline.returncode == 2
    assert "copy the model's directory here and run `vectormill models add PATH`" in offline.stderr
    with serving_hub(write_static(tmp_path / "model", normalize=True)) as (environment, fetched):
        done = add(environment)
    assert done.returncode == 0, done.stderr
    assert any(name.endswith("model.safetensors") for name in fetched)
    assert "Fetching" in done.stderr, "a progress bar"
    assert "It was not loaded: this installation has no torch" in done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    assert read_names(tmp_path) == {"some-model": {"path": "some-org/some-model", "revision": COMMIT}}
    again = add({"HF_HUB_OFFLINE": "1"})
    assert again.returncode == 0, "what is in the cache needs no network"
    given = json.dumps({"given": {"path": "some-org/some-model"}})
    prepared = add({"HF_HUB_OFFLINE": "1", "VECTORMILL_MODELS": given}, model="given")
    assert prepared.returncode == 0, prepared.stderr
    with serving_hub(write_adapted(tmp_path / "adapted")) as (environment, _):
        done = add(environment, "--adapter", ADAPTER, "--name", "adapted", model="some-org/other-model")
    assert done.returncode == 0, done.stderr
    assert read_names(tmp_path)["adapted"]["revision"] == COMMIT, "of the files, without the adapter's name"


# Models of the layouts in which the suggested ones are published, as tests/contract compares them.
LAYOUTS: Final[Mapping[str, Callable[[Path], Path]]] = {
    "BAAI/bge-m3": lambda target: write_random_embedder(SMALL, packaged_model(), target),
    "colbert-ir/colbertv2.0": write_stanford_colbert,
    "cross-encoder/ms-marco-MiniLM-L6-v2": lambda target: write_classifier(target, "bert", num_labels=1),
    "papluca/xlm-roberta-base-language-detection": lambda target: write_classifier(target, "xlm-roberta"),
    "urchade/gliner_small-v2.1": lambda target: shutil.copytree(
        GLINER / "deberta", target, dirs_exist_ok=True
    ),
}
FIRST: Final = {row.need: row for row in reversed(SUGGESTIONS)}
EACH: Final = {row.hub_name: row for row in reversed(SUGGESTIONS)}


def test_every_task_and_output_has_a_suggested_model_with_a_test_that_compares_its_layout() -> None:
    assert FIRST.keys() == TASKS.keys() | set(OUTPUTS) - {DENSE}
    assert EACH.keys() == LAYOUTS.keys()
    for row in SUGGESTIONS:
        test = (TESTS / row.test).read_text(encoding="utf-8")
        assert row.compared_with in test, row
        assert (f"('{row.hub_name}').save_pretrained('{row.name}')" in row.conversion) == bool(row.conversion)


@pytest.mark.parametrize("need", FIRST)
def test_what_the_model_cannot_compute_is_refused_with_the_command_that_adds_one(need: str) -> None:
    wanted: dict[str, Any] = {"task": need} if need in TASKS else {"outputs": f"dense, {need}"}
    other = GLINER / "deberta" if need in (JUDGE, "embed") else packaged_model()
    registry = Registry({"other": ModelEntry(path=str(other))})
    options = EncodingOptions(**wanted)
    with pytest.raises(InvalidOption, match=re.escape(f"`{FIRST[need].command}` where the API runs.")):
        make_spec(registry.card("other"), options)
    if need != "embed":  # which nearly every model computes
        with pytest.raises(UnknownModel, match=re.escape(FIRST[need].command)):
            registry.card("nothing", need=find_need(options))


@pytest.mark.parametrize(
    "outputs",
    [named for size in (1, 2, 3) for named in combinations(OUTPUTS, size) if named != (DENSE,)],
    ids=str,
)
def test_the_model_that_a_refusal_names_computes_all_outputs_that_were_asked_for(
    outputs: tuple[str, ...], tmp_path: Path
) -> None:
    options = EncodingOptions(outputs=",".join(outputs))
    with pytest.raises(InvalidOption) as refused:
        make_spec(Registry({}).card(DEFAULT_MODEL), options)
    row = next(row for row in SUGGESTIONS if row.command in str(refused.value))
    registry = Registry({row.name: ModelEntry(path=str(LAYOUTS[row.hub_name](tmp_path)))})
    assert make_spec(registry.card(row.name), options).outputs == ",".join(outputs)


def test_a_refusal_of_an_output_that_does_not_exist_names_no_model() -> None:
    with pytest.raises(InvalidOption, match=r"separated by commas; got 'sparse,both'\.$"):
        make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions(outputs="sparse,both"))


@pytest.mark.parametrize(
    "row",
    [
        # Each loads, converts and certifies a model in a process of its own; that with the least to do runs always.
        pytest.param(row, id=row.name, marks=() if "gliner" in row.name else pytest.mark.slow)
        for row in EACH.values()
    ],
)
def test_the_suggested_command_adds_a_model_that_does_what_it_is_suggested_for(
    row: Suggestion, tmp_path: Path
) -> None:
    (tmp_path / row.name).mkdir()
    program = COMMAND if row.need == EXTRACT else WITHOUT_TORCH  # row.test loads all others
    with serving_hub(LAYOUTS[row.hub_name](tmp_path / row.name)) as (environment, _):
        argv = [*program, *shlex.split(row.command)[1:], "--json"]
        done = run_with_hub(argv, tmp_path / "home", environment, tmp_path if row.conversion else None)
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout)
    assert row.need in (added["task"], *added["outputs"])
    assert read_names(tmp_path).keys() == {row.name}
