"""Stranger (e) has made a model that somebody registers here: what its files may cost, and what they may see."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.commands import run
from tests.models import packaged_model
from tests.waiting import wait_for
from vectormill.domain.errors import ModelError
from vectormill.models import card_reader
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.processes.supervisor import ChildSpec
from vectormill.settings import ModelEntry, load_settings
from worker import launcher

SECRET: Final = "a-secret-of-the-parent"
SECONDS: Final = 90.0
ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def write_template(directory: Path, template: str, file: str = "chat_template.jinja") -> None:
    """Make a reranker of the model, whose pairs its chat template puts into words."""
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (directory / "modules.json").write_text(json.dumps([module]))
    told = {"modality_config": {"message": {"method": "forward"}}}
    (directory / "sentence_bert_config.json").write_text(json.dumps(told))
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"]}
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".json"):
        template = json.dumps(json.loads((directory / file).read_text()) | {"chat_template": template})
    (directory / file).write_text(template)


def write_pickle(directory: Path, opcodes: bytes) -> None:
    (directory / "model.safetensors").unlink()
    with zipfile.ZipFile(directory / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", opcodes)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@dataclass(frozen=True)
class Hostile:
    """A change that a stranger makes to a model's files, and the file and the words that the refusal must name."""

    do: Callable[[Path], object]
    file: str
    words: str


DEEP: Final = 100_000
HOSTILE: Final = {
    "endless": Hostile(lambda at: write_template(at, ENDLESS), "chat_template.jinja", "processor time"),
    "endless-json": Hostile(
        lambda at: write_template(at, ENDLESS, "tokenizer_config.json"), "tokenizer_config.json", "processor time"
    ),
    "huge-text": Hostile(
        lambda at: write_template(at, "{{ 'a' * 99999999999 }}"), "chat_template.jinja", "GiB of memory"
    ),
    "huge-memo": Hostile(
        lambda at: write_pickle(at, b"\x80\x02Nr\xff\xff\xff\x7f."), "pytorch_model.bin", "GiB of memory"
    ),
    "deep-pickle": Hostile(
        lambda at: write_pickle(at, b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."),
        "pytorch_model.bin",
        "mapping of names",
    ),
    "calling": Hostile(lambda at: write_pickle(at, b"cos\nsystem\n(S'id'\ntR."), "pytorch_model.bin", "os.system"),
    "deep-config": Hostile(
        lambda at: (at / "config.json").write_text('{"a":' * DEEP), "config.json", "cannot be read"
    ),
    "deep-modules": Hostile(lambda at: (at / "modules.json").write_text("[" * DEEP), "modules.json", "cannot be read"),
    "many-tokens": Hostile(
        lambda at: (at / "tokenizer.json").write_bytes(b'{"model":[' + b"[]," * 20_000_000 + b"[]]}"),
        "tokenizer.json",
        "to read",
    ),
    "huge-header": Hostile(
        lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x3f{}"), "model.safetensors", "header"
    ),
    "odd-types": Hostile(
        lambda at: (at / "config_sentence_transformers.json").write_text('{"prompts": 7}'),
        "config_sentence_transformers.json",
        "must be an object",
    ),
    "pipe": Hostile(lambda at: replace_by_pipe(at / "tokenizer.json"), "tokenizer.json", "neither a file nor a folder"),
}  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelEntry]:
    found = {}
    for name, hostile in HOSTILE.items():
        directory = Path(shutil.copytree(packaged_model(), tmp_path / name))
        hostile.do(directory)
        found[name] = ModelEntry(path=str(directory))
    return found


def test_a_hostile_model_is_marked_alone_and_every_other_model_works(
    engine: Engine, models: dict[str, ModelEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(card_reader.LIMITS, "RLIMIT_CPU", 2)
    monkeypatch.setattr(card_reader, "PATIENCE_SECONDS", SECONDS)  # a machine that is busy
    with api_client(engine, models=models) as client:
        answer = client.get("/v1/models", timeout=SECONDS)
        found = {body["name"]: body for body in answer.json()["data"]}
        assert found[DEFAULT_MODEL]["problem"] is None
        for name, hostile in HOSTILE.items():
            problem = found[name]["problem"] or "none"
            assert all(part in problem for part in (name, hostile.file, hostile.words)), f"{name}: {problem}"
        monkeypatch.setattr(card_reader, "BOOTSTRAP", "raise SystemExit(1)")
        assert client.get("/v1/models").json() == answer.json(), "a refusal is kept until the files change"
        job = {"items": [{"key": "a", "text": "a"}], "model": DEFAULT_MODEL}
        assert client.post("/v1/jobs", json=job).status_code == 202
        refused = client.post("/v1/jobs", json=job | {"model": "endless"})
        assert refused.status_code == 503
        assert "chat_template.jinja" in refused.json()["detail"]


def test_what_reads_a_model_sees_no_variable_and_no_file_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN", SECRET)
    directory = Path(shutil.copytree(packaged_model(), tmp_path / "model"))
    write_template(directory, ENDLESS)

    def list_readers() -> Iterator[psutil.Process]:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if any("card_process" in word for word in child.cmdline()):
                    yield child

    with ThreadPoolExecutor(1) as pool, (tmp_path / "open").open("w"):
        reading = pool.submit(card_reader.read_card, "model", directory, ModelEntry(path=str(directory)))
        child = wait_for(lambda: next(list_readers(), None))
        assert child.environ().keys() <= {*card_reader.KEPT_VARIABLES, "LC_CTYPE"}
        assert SECRET not in Path(f"/proc/{child.pid}/environ").read_text()
        held = {path.name: str(path.readlink()) for path in Path(f"/proc/{child.pid}/fd").iterdir()}
        assert not {str(tmp_path / "open")} & set(held.values())
        assert (held["0"], held["2"]) == ("/dev/null", "/dev/null")
        assert not child.net_connections(), "no socket is inherited"
        child.kill()
        with pytest.raises(ModelError, match=r"model.*cannot be read: the process that reads it has ended"):
            reading.result()


def test_a_model_that_was_mended_is_read_again(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packaged_model(), tmp_path / "model"))
    entry, config = ModelEntry(path=str(directory)), (directory / "config.json").read_text()
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        card_reader.read_card("model", directory, entry)
    (directory / "config.json").write_text(config)
    assert card_reader.read_card("model", directory, entry).dimension == 384


PLANNING: Final = """
import sys
opened = []

def is_hashing():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "identify_directory":
        frame = frame.f_back
    return frame is not None

def note(event, told):
    if event == "open" and not is_hashing():
        opened.append(str(told[0]))

sys.addaudithook(note)
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry
from worker.devices.described import describe_inventory
from worker.plan import plan_machine
from worker.settings import WorkerSettings
registry = Registry({"m": ModelEntry(path=sys.argv[1])})
card = registry.card("m", weights=True)
make_spec(card, EncodingOptions())
print(plan_machine([card, registry.outline("m")], describe_inventory("2cores,4GiB"), WorkerSettings())[0].name)
print([path for path in opened if path.startswith(sys.argv[1])])
"""


def test_who_checks_jobs_and_plans_opens_files_of_a_model_for_their_digest_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, str(packaged_model())], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["m", "[]"]


class Started(Exception):
    """Carries the workers that a launcher would start."""


def test_commands_leave_a_damaged_model_out_unless_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(packaged_model(), tmp_path / "torn"))
    (directory / "config.json").write_text("{")
    monkeypatch.setenv("VECTORMILL_MODELS", json.dumps({"torn": {"path": str(directory)}}))
    assert run("plan", "--devices", "2cores,4GiB") == 0
    shown = capsys.readouterr()
    assert "config.json" in shown.err
    assert "replicate" in shown.out
    assert run("plan", "--devices", "2cores,4GiB", "--model", "torn") != 0

    def start(specs: list[ChildSpec], **_: object) -> None:
        raise Started({spec.name.split()[0] for spec in specs})

    monkeypatch.setattr(launcher, "Supervisor", start)
    with pytest.raises(Started, match=DEFAULT_MODEL):
        launcher.run(load_settings(), [])
    with pytest.raises(ModelError, match=r"config\.json"):
        launcher.run(load_settings(), [DEFAULT_MODEL, "torn"])
