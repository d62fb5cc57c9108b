"""An engine refuses whatever the plan refuses, with the same sentence and before it starts any process."""

from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.classifiers import STRUCTBERT
from tests.contract.packed_models import TOKENIZER, make_transformer
from tests.models import read_card
from tests.rexuninlu import GOLDEN
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import ModelDoesNotFit, ModelError
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.settings import ModelEntry
from worker.devices.described import describe_inventory
from worker.devices.device import Device
from worker.engine.engine import Engine
from worker.placement.obstacles import find_obstacle
from worker.placement.placement import Replica
from worker.placement.strategies import FULLY_SHARDED, OFFLOAD, PIPELINE, TENSOR
from worker.plan import plan_worker
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

SIZES = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}


def make_card(folder: Path, name: str, sizes: Mapping[str, Any] = SIZES) -> ModelCard:
    make_transformer(name, **sizes).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return read_model_card(name, folder, ModelEntry(path=str(folder), pooling="mean"))


def check(card: ModelCard, strategy: str, num_devices: int, expected: str, **settings: Any) -> None:
    """Both refuse with this sentence, or if it is empty neither does."""
    asked = WorkerSettings(strategy=strategy, **settings)
    inventory = describe_inventory(f"{num_devices}x8GiB")
    devices = inventory.accelerators
    if not expected:
        assert plan_worker(card, inventory, asked).strategy == strategy
        Engine(card, devices[0], asked, card.path, sharing=share(strategy, devices))
        return
    with pytest.raises(ModelDoesNotFit) as unplanned:
        plan_worker(card, inventory, asked)
    with pytest.raises(ModelError) as unloaded:
        Engine(card, devices[0], asked, card.path, sharing=share(strategy, devices))
    for refused in (unplanned, unloaded):
        assert expected in str(refused.value)


def share(strategy: str, devices: tuple[Device, ...]) -> Sharing:
    return Sharing(Replica(strategy, (), 1024, 1.0), devices)


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do(tmp_path: Path) -> None:
    card = make_card(tmp_path, "qwen2")
    check(card, TENSOR, 2, "")
    three = share(TENSOR, describe_inventory("3x8GiB").accelerators)  # of which a plan would leave one idle
    why = "12 attention heads, 4 key heads and 96 intermediate values cannot be divided among 3 devices"
    with pytest.raises(ModelError, match=f"{why}; possible numbers are 1, 2, 4, 12"):
        Engine(card, three.devices[0], WorkerSettings(), tmp_path, sharing=three)


@pytest.mark.parametrize("strategy", [PIPELINE, TENSOR, FULLY_SHARDED])
@pytest.mark.parametrize("name", ["albert", "deberta-v2"])
def test_what_cannot_be_divided_is_refused_where_it_is_planned_and_where_it_is_loaded(
    tmp_path: Path, name: str, strategy: str
) -> None:
    card = make_card(tmp_path, name, {"hidden_size": 32})
    expected = "models of the architecture 'albert' cannot be shared between devices"
    if name == "deberta-v2":
        expected = "relative positions" if strategy == TENSOR else ""
    check(card, strategy, 2, expected)


def test_options_that_only_single_devices_have_are_refused() -> None:
    card = read_card(STRUCTBERT / "model")
    check(card, PIPELINE, 2, "only torch runs parts of a model", backend="openvino")
    check(card, FULLY_SHARDED, 2, "computed in tiles", reproducible=True)
    check(read_card(GOLDEN / "model"), OFFLOAD, 1, "an extractor reads its layers' weights when it is loaded")
    check(read_card(GOLDEN / "model"), TENSOR, 2, "relative positions")
    check(card, PIPELINE, 2, "")


def test_no_option_of_a_job_is_an_obstacle_so_that_none_has_to_be_refused_for_it() -> None:
    """tests/contract/test_shared_agrees.py shows that shared models compute all outputs and passages."""
    asked = set(signature(find_obstacle).parameters)
    assert asked == {"card", "strategy", "devices", "precision", "backend", "is_reproducible"}
    assert not {field.name for field in fields(EncodingOptions)} & asked
