"""Ranks pack all or none, whatever one of them finds: real processes, one with a kernel or a card of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.disagreeing_program import STRATEGIES, load_all
from tests.contract.packed_models import TOKENIZER, make_transformer
from tests.contract.rank_program import DEVICE, NUM_LAYERS
from tests.contract.ranks import run_ranks
from worker.devices.device import device_environment
from worker.parallel.rendezvous import find_first_objection
from worker.runner.starter import LOOPBACK

pytestmark = pytest.mark.tail

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
        assert rank[f"{strategy}|right"] == {"packed": True, "on": ["packed_ranks"], "notes": []}
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
    assert (first["packed"], first["on"]) == (False, [])
    (note,) = first["notes"]
    assert note.startswith(f"The switch packed_ranks is off, because {reason}")
    asked = [rank[f"{strategy}|{kernel}|asked"]["error"] for rank in found]
    assert asked[0] == asked[1]
    assert asked[0].startswith(f"Packed attention cannot be used, because {reason}")
    assert asked[0].endswith("; use padded or auto.")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_does_not_want_to_pack_keeps_the_others_from_it(strategy: str, found: Found) -> None:
    note = "The switch packed_ranks is off, because it is not asked for (on rank {})."
    for case, wants, refuses in (("another card", 0, 1), ("another card first", 1, 0)):
        for rank in found:
            assert not rank[f"{strategy}|{case}"]["packed"]
        assert found[wants][f"{strategy}|{case}"]["notes"] == [note.format(refuses)]
        assert found[refuses][f"{strategy}|{case}"]["notes"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vectors_are_those_of_padding_after_a_kernel_was_refused(strategy: str, folder: Path) -> None:
    ranks = [np.load(folder / f"{number}.npz") for number in range(WORLD_SIZE)]
    for case in ("refuses", "not finite", "wrong", "another card"):
        for rank in ranks:
            packed, padded = rank[f"{strategy}|right"], rank[f"{strategy}|{case}"]
            assert packed.shape == padded.shape
            assert np.abs(packed - padded).max(initial=0.0) < 1e-4


def test_the_first_objection_is_told_with_its_rank() -> None:
    assert find_first_objection(["", "no", "never"]) == "no (on rank 1)"
    assert find_first_objection(["", ""]) == ""
