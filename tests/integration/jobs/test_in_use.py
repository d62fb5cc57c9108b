"""A model with a setting that cannot be honoured is refused, unless it was in use before."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests import protocol
from tests.api_server import api_client, assert_problem, many
from tests.models import packaged_model
from tests.protocol import make_items
from vectormill.cli.models import show_model
from vectormill.domain.encoding import DEFAULT_MODEL, EncodingOptions
from vectormill.models.registry import Registry
from vectormill.models.specs import make_spec
from vectormill.settings import ModelEntry


def test_an_upgrade_refuses_no_model_of_which_there_are_jobs(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(packaged_model(), tmp_path / "odd"))
    file = directory / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"no_such_key": [7]}))
    models = {"odd": ModelEntry(path=str(directory))}
    body = {"model": "odd", "items": many(1)}
    with api_client(engine, models=models) as client:
        refused = client.post("/v1/jobs", json=body)
        assert_problem(
            refused, 422, "unsupported-model", "sentence_bert_config.json of model 'odd' has no_such_key [7]"
        )
        shown = {model["name"]: model for model in client.get("/v1/models").json()["data"]}
        assert "no_such_key" in shown["odd"]["problem"]
        assert shown[DEFAULT_MODEL]["problem"] is None

    spec = make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions())
    protocol.submit(engine, make_items(1), spec=replace(spec, model="odd"))
    with api_client(engine, models=models) as client:
        assert client.post("/v1/jobs", json=body).status_code in (201, 202)
        told = client.get("/v1/models/odd").json()
        assert told["problem"] is None
        assert "goes on as before, without this" in told["notes"][0]
    show_model(told)
    assert "sentence_bert_config.json: max_seq_length 256" in capsys.readouterr().out
