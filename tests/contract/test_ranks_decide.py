"""Ranks pack all or none, whatever one of them finds: real processes, one with a kernel or a card of its own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.contract.packed_models import TOKENIZER, make_transformer
from tests.contract.rank_program import DEVICE, NUM_LAYERS, batches, stage_layers
from tests.contract.ranks import run_ranks
from tests.rerankers import read_card
from vectormill.domain.errors import ModelError
from worker.devices.device import Device, device_environment
from worker.encoder.choice import PACKED, PADDED, AttentionShape
from worker.encoder.encoder import Choice, EncoderOrder
from worker.model.forms import Form
from worker.model.packed import Kernel, exact_kernel
from worker.parallel import shard_encoder
from worker.parallel.agreement import find_first_objection
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.placement import Rank
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR
from worker.runner.starter import LOOPBACK

STRATEGIES: Final = (TENSOR, PIPELINE, FULLY_SHARDED)
CARD_FEATURE: Final = "a card"


def refuse(query: Tensor, *_: Any) -> Tensor:
    raise RuntimeError("this build has no such kernel\nand a second line")


def answer_nan(query: Tensor, *_: Any) -> Tensor:
    return torch.full_like(query, float("nan"))


def forget_bounds(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, *others: Any
) -> Tensor:
    """As if all were one sequence."""
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return exact_kernel(query, key, value, whole, len(query), *others)


# This is the value of the last rank; the others have the right one.
KERNELS: Final[Mapping[str, Kernel]] = {
    "right": exact_kernel,
    "refuses": refuse,
    "not finite": answer_nan,
    "wrong": forget_bounds,
}


def load_all(number: int, world_size: int, folder: Path) -> None:
    """Leaves in `number.json` what this rank made of every case, and its vectors in `number.npz`."""
    found: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    kept: list[ShardEncoder] = []
    is_last = number == world_size - 1
    card = read_card(folder / "bert", pooling="mean+last_token")

    def load(strategy: str, attention: str, *, has_card: bool = True) -> ShardEncoder:
        device = replace(DEVICE, features=frozenset({CARD_FEATURE}) if has_card else frozenset())
        layers = stage_layers(strategy, world_size)
        rank = Rank(number, world_size, strategy, layers, folder / "meeting_point", 60.0)
        order = EncoderOrder(card, device, "torch", "fp32", 1, folder, attention, rank)
        return ShardEncoder(order, rank)

    def note(case: str, make: Callable[[], ShardEncoder]) -> None:
        try:
            encoder = make()
        except ModelError as error:
            found[case] = {"error": str(error)}
            return
        kept[:] = [encoder]  # another rank may still wait for what this one has sent
        report = encoder.describe()
        found[case] = {"packed": report.is_packed, "because": reasons[-1]}
        for place, batch in enumerate(batches()):
            rows = encoder.encode(batch)
            vectors[f"{case}|{place}"] = rows.covered.reshape(len(rows), card.dimension)

    def pack_by_default(wanted: str, shape: AttentionShape, device: Device, precision: str) -> Choice:
        if CARD_FEATURE in device.features:
            return Choice(PACKED, "it is such a card")
        return Choice(PADDED, "it is another card")

    reasons: list[str] = []
    load_form = ShardEncoder._load_form

    def note_reason(encoder: ShardEncoder, order: EncoderOrder, precision: Choice) -> tuple[Form, Choice]:
        form, attention = load_form(encoder, order, precision)
        reasons.append(attention.reason)
        return form, attention

    with (
        patch.object(shard_encoder, "choose_attention", pack_by_default),
        patch.object(ShardEncoder, "_load_form", note_reason),
    ):
        for strategy in STRATEGIES:
            for name, kernel in KERNELS.items():
                with patch.object(shard_encoder, "exact_kernel", kernel if is_last else exact_kernel):
                    note(f"{strategy}|{name}", partial(load, strategy, "auto"))
                    note(f"{strategy}|{name}|asked", partial(load, strategy, PACKED))
            for name, has_card in (("another card", not is_last), ("another card first", number > 0)):
                note(f"{strategy}|{name}", partial(load, strategy, "auto", has_card=has_card))
    (folder / f"{number}.json").write_text(json.dumps(found))
    np.savez(folder / f"{number}.npz", allow_pickle=False, **vectors)


WORLD_SIZE = 2

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deciding")
    make_transformer("bert", num_hidden_layers=NUM_LAYERS).save_pretrained(directory / "bert")
    (directory / "bert" / "tokenizer.json").write_text(TOKENIZER)
    environment = device_environment(DEVICE, 1) | LOOPBACK
    run_ranks(load_all, [(number, WORLD_SIZE, directory) for number in range(WORLD_SIZE)], environment)
    return directory


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(WORLD_SIZE)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_pack_together_where_all_agree_with_padding(strategy: str, found: Found) -> None:
    for rank in found:
        assert rank[f"{strategy}|right"] == {"packed": True, "because": "it is such a card"}
        assert rank[f"{strategy}|right|asked"]["packed"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("refuses", "packed attention failed: this build has no such kernel (on rank 1)"),
        ("not finite", "packed attention deviates from padding: the smallest cosine is nan"),
        ("wrong", "packed attention deviates from padding: the smallest cosine is "),
    ],
)
def test_a_kernel_that_is_bad_on_one_rank_packs_none_and_keeps_none_waiting(
    strategy: str, kernel: str, reason: str, found: Found
) -> None:
    first, second = (rank[f"{strategy}|{kernel}"] for rank in found)
    assert first == second
    assert not first["packed"]
    assert first["because"].startswith(reason)
    asked = [rank[f"{strategy}|{kernel}|asked"]["error"] for rank in found]
    assert asked[0] == asked[1]
    assert asked[0].startswith(f"Packed attention cannot be used because {reason}")
    assert asked[0].endswith("; use padded or auto.")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_cannot_pack_keeps_the_others_from_it(strategy: str, found: Found) -> None:
    for case, refuses in (("another card", 1), ("another card first", 0)):
        told = {"packed": False, "because": f"it is another card (on rank {refuses})"}
        assert [rank[f"{strategy}|{case}"] for rank in found] == [told, told]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vectors_are_those_of_padding_after_a_kernel_was_refused(strategy: str, folder: Path) -> None:
    ranks = [np.load(folder / f"{number}.npz") for number in range(WORLD_SIZE)]
    packed, *padded = (
        np.concatenate(
            [rank[f"{strategy}|{case}|{place}"] for place in range(len(batches())) for rank in ranks]
        )
        for case in ("right", "refuses", "not finite", "wrong", "another card")
    )
    for vectors in padded:
        assert packed.shape == vectors.shape
        assert np.abs(packed - vectors).max() < 1e-4


def test_the_first_objection_is_told_with_its_rank() -> None:
    assert find_first_objection(["", "no", "never"]) == "no (on rank 1)"
    assert find_first_objection(["", ""]) == ""
