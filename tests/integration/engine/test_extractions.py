"""Texts and a schema through the whole engine give the records of RexUniNLU's reference, alone and together."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.models import DEVICE, read_card
from tests.rexuninlu import GOLDEN, MODELS, Case, describe, is_certain, list_cases, summarize
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.domain.schema import check_schema
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import make_spec
from worker.devices.detect import detect_inventory
from worker.devices.device import Inventory
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.placement.strategies import PIPELINE
from worker.plan import plan_machine
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

CARDS = {model: read_card(GOLDEN / model) for model in MODELS}


def is_taken(case: Case) -> bool:
    """Whether a job may ask this: what the reference would leave out in silence is refused."""
    try:
        check_schema(case["schema"])
    except InvalidOption:
        return False
    return bool(case["text"].strip()) and not case.get("raises")


CERTAIN = [case for case in list_cases("natural") if is_certain(case) and is_taken(case)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    # Of one model batches are computed side by side.
    started = {
        model: Engine(card, DEVICE, WorkerSettings(threads=threads), tmp_path_factory.mktemp("cache"))
        for threads, (model, card) in enumerate(CARDS.items(), start=1)
    }
    for engine in started.values():
        engine.start()
    yield started
    for engine in started.values():
        engine.stop()


def make(card: ModelCard, schema: Any, **options: Any) -> EncodingSpec:
    return make_spec(card, EncodingOptions(extract_schema=json.dumps(schema), **options))


def extract(engine: Engine, spec: EncodingSpec, texts: list[str]) -> EncodeResult:
    request = EncodeRequest("r", spec, [text.encode() for text in texts], False, 1_000_000)
    return engine.encode(request, threading.Event())


def read(result: EncodeResult, index: int) -> Any:
    return json.loads(result.results.row(index).tobytes())


@pytest.mark.parametrize("case", CERTAIN, ids=lambda case: str(case["id"]))
def test_a_text_has_the_records_of_the_reference(engines: dict[str, Engine], case: Case) -> None:
    result = extract(engines[case["model"]], make(CARDS[case["model"]], case["schema"]), [case["text"]])
    assert not result.failures
    assert describe(read(result, 0)) == summarize(case["output"])
    assert result.num_tokens[0] > 0


def test_there_are_cases_that_ask_again_below_what_they_found() -> None:
    assert len(CERTAIN) > 10
    assert any(len(case["levels"]) > 1 and case["output"]["count"] for case in CERTAIN)


def test_an_engine_on_two_devices_has_the_records_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As it is planned: stages, which answer each level of a text before the next one is asked."""
    found = detect_inventory()
    cores = found.physical_cores if len(found.physical_cores) > 1 else found.physical_cores * 2
    inventory = Inventory((), cores, found.memory_bytes, found.features, found.description)
    settings = WorkerSettings(devices="cpu:0,cpu:1", strategy=PIPELINE)
    card = CARDS["model"]
    (planned,) = plan_machine([card], inventory, settings)
    (replica,) = planned.placement.replicas
    sharing = Sharing(replica, planned.devices)
    engine = Engine(card, planned.devices[0], settings, tmp_path_factory.mktemp("cache"), sharing=sharing)
    engine.start()
    cases = [case for case in CERTAIN if case["model"] == "model"]
    deepest = max(cases, key=lambda case: len(case["levels"]))
    for case in (deepest, *cases[:2]):
        result = extract(engine, make(card, case["schema"]), [case["text"]])
        assert not result.failures
        assert describe(read(result, 0)) == summarize(case["output"])
    assert len(deepest["levels"]) > 1
    report = engine.report()
    assert PIPELINE in report["backend"]["reason"]
    assert [loading["device"] for loading in report["loadings"]] == ["cpu:0", "cpu:1"]
    engine.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EncodingOptions(), "requires a schema"),
        (EncodingOptions(extract_schema="{"), "schema: not valid JSON"),
        (EncodingOptions(extract_schema='{"a": {"[TYPE]b": null}}'), r"schema\.a\.\[TYPE\]b"),
        (EncodingOptions(extract_schema='{"a": null}', max_tokens=100), "max_tokens has no effect"),
        (EncodingOptions(extract_schema='{"a": null}', task="embed"), "supports the task extract"),
    ],
)
def test_what_cannot_be_extracted_is_refused(options: EncodingOptions, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make_spec(CARDS["model"], options)


def test_a_wish_that_this_model_cannot_fulfil_is_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = WorkerSettings(threads=1, precision="int8")
    engine = Engine(CARDS["model"], DEVICE, settings, tmp_path_factory.mktemp("cache"))
    with pytest.raises(ModelError, match="fp32 and bf16"):
        engine.start()
    engine.stop()
