"""What each rank runs in the tests of how ranks come to one decision: one of them has a card or a kernel of its own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.contract.rank_program import DEVICE, batches, stage_layers
from vectormill.domain.errors import ModelError
from vectormill.models.model_card import read_model_card
from worker.encoder import switches
from worker.encoder.choice import PACKED, PADDED
from worker.encoder.encoder import Choice, EncoderOrder
from worker.encoder.switches import PACKED_RANKS, SwitchDefaults
from worker.model.packed import Kernel, exact_kernel
from worker.parallel import rank_switches as choice
from worker.parallel import shard_encoder
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.placement import Rank
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR

STRATEGIES: Final = (TENSOR, PIPELINE, FULLY_SHARDED)
CARD_FEATURE: Final = "a card"
MEASURED: Final = {CARD_FEATURE: SwitchDefaults((PACKED_RANKS,), "today")}


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


# Of the last rank; the others have the right one.
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
    is_last = number == world_size - 1
    card = read_model_card("bert", folder / "bert", pooling="mean+last_token")

    def load(strategy: str, attention: str, *, has_card: bool = True) -> ShardEncoder:
        device = replace(DEVICE, features=frozenset({CARD_FEATURE}) if has_card else frozenset())
        layers = stage_layers(strategy, world_size)
        rank = Rank(number, world_size, strategy, layers, 3, folder / "meeting_point", 60.0)
        order = EncoderOrder(card, device, "torch", "fp32", 1, folder, attention, rank)
        return ShardEncoder(order, rank)

    def note(case: str, make: Callable[[], ShardEncoder]) -> None:
        try:
            encoder = make()
        except ModelError as error:
            found[case] = {"error": str(error)}
            return
        report = encoder.describe()
        found[case] = {"packed": report.is_packed, "on": report.switches, "notes": report.notes}
        parts = [encoder.encode(batch).matrix for batch in batches()]
        vectors[case] = np.concatenate([np.zeros((0, card.dimension)), *filter(len, parts)])

    def pack_by_default(wanted: str, *_: Any) -> Choice:
        return Choice(wanted if wanted == PADDED else PACKED, "as on a card")

    with (
        patch.object(choice, "choose_attention", pack_by_default),
        patch.object(switches, "load_defaults", lambda: MEASURED),
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
