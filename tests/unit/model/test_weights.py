"""Weights: headers and tensors of their files, of which no pickle is run, and their rounded numbers."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.classifiers import STRUCTBERT
from tests.models import TinyModels, read_card
from tests.rexuninlu import GOLDEN
from vectormill.domain.errors import ModelError
from vectormill.models.rounding import RoundedWeight, round_linear, round_table
from vectormill.models.tensor_headers import TensorHeader, read_header
from worker.model.network import EncoderNetwork
from worker.model.weights import RoundedEmbedding, RoundedLinear, apply_quantization, open_weights

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "positions": torch.arange(5)[None],
}


def write_pickle(path: Path, tensors: dict[str, Tensor], *, is_old: bool = False) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=not is_old)
    return path


@pytest.mark.parametrize("is_old", [False, True], ids=["zip", "before torch 1.6"])
def test_a_pickle_has_the_header_and_the_tensors_of_a_safetensors_file(tmp_path: Path, is_old: bool) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = read_header(tmp_path / "model.safetensors")
    path = write_pickle(tmp_path / "pytorch_model.bin", TENSORS, is_old=is_old)
    assert read_header(path) == expected
    assert expected["b"] == TensorHeader("BF16", (2, 3))
    with open_weights(path) as file:
        assert sorted(file.keys()) == sorted(TENSORS)
        assert torch.equal(file.get_slice("a.weight")[:, 1:3], TENSORS["a.weight"][:, 1:3])
        assert torch.equal(file.get_tensor("positions"), TENSORS["positions"])


def test_the_state_of_a_module_and_its_parameters_are_read_too(tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    for number, state in enumerate((module.state_dict(), dict(module.named_parameters()))):
        path = tmp_path / f"{number}.bin"
        torch.save(state, path)
        assert read_header(path) == {"weight": TensorHeader("F32", (3, 2)), "bias": TensorHeader("F32", (3,))}


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_a_pickle_that_would_call_anything_else_is_not_run(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pytorch_model.bin"
    if way == "torch":
        torch.save({"a": Harmful()}, path)
    else:
        path.write_bytes(pickle.dumps({"a": Harmful()}))
    with pytest.raises(ModelError, match="cannot be read as a pickle of tensors alone"):
        read_header(path)
    with pytest.raises(ModelError, match="Cannot read the tensors"), open_weights(path):
        pass
    assert "harm" not in capsys.readouterr().out


def test_what_is_no_tensor_is_said(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "x.bin")
    with pytest.raises(ModelError, match="does not contain a mapping of names to tensors"):
        read_header(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "directory", [STRUCTBERT / "model", GOLDEN / "model"], ids=["structbert", "rexuninlu"]
)
def test_a_model_that_is_published_as_a_pickle_has_the_card_and_shape_of_its_tensors(
    directory: Path, tmp_path: Path
) -> None:
    """transformers, by which others are converted, can read neither."""
    copy = Path(shutil.copytree(directory, tmp_path / directory.name))
    write_pickle(copy / "pytorch_model.bin", load_file(copy / "model.safetensors"))
    (copy / "model.safetensors").unlink()
    card, expected = read_card(copy), read_card(directory)
    assert (card.is_extractor, card.classifier) == (expected.is_extractor, expected.classifier)
    assert card.num_parameters == expected.num_parameters
    shape, whole = card.find_shape(), expected.find_shape()
    assert set(shape.tensors) == set(whole.tensors)
    revision = card.revision
    tensors = torch.load(copy / "pytorch_model.bin", weights_only=True)
    write_pickle(copy / "pytorch_model.bin", {name: tensor * 2 for name, tensor in tensors.items()})
    assert read_card(copy).revision != revision


def test_any_model_is_read_from_the_pickle_that_torch_wrote(tmp_path: Path) -> None:
    """As BAAI/bge-m3 is published; its Dense modules too."""
    models = TinyModels(tmp_path)
    expected = read_card(models.sentence_transformer("cls", dense=True))
    copy = Path(shutil.copytree(expected.path, tmp_path / "copy"))
    for path in [*copy.glob("*.safetensors"), *copy.glob("*/*.safetensors")]:
        write_pickle(path.with_name("pytorch_model.bin"), load_file(path))
        path.unlink()
    networks = [EncoderNetwork(card, torch.float32) for card in (expected, read_card(copy))]
    whole, pickled = (network.state_dict() for network in networks)
    assert whole.keys() == pickled.keys()
    assert all(torch.equal(whole[name], pickled[name]) for name in whole)


WEIGHT = torch.randn((6, 128), generator=torch.Generator().manual_seed(0))


def rounded(weight: Tensor, num_inputs: int | None = None) -> Tensor:
    layer = RoundedLinear(weight.shape, torch.float32, None, num_inputs)
    assert layer.numbers.is_meta, "nothing is held before"
    layer.hold(weight)
    return layer.weight


def test_rows_and_whole_groups_of_a_weight_are_rounded_as_in_the_whole() -> None:
    whole = rounded(WEIGHT)
    assert whole.shape == WEIGHT.shape
    assert 0 < (whole - WEIGHT).abs().max() < 0.3
    assert torch.equal(rounded(WEIGHT[2:5]), whole[2:5])
    assert torch.equal(rounded(WEIGHT[:, 64:], num_inputs=128), whole[:, 64:])


def test_a_part_that_cuts_a_group_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match=r"multiple of the group size \(64\); use fewer devices"):
        rounded(WEIGHT[:, :32], num_inputs=128)


def test_a_model_keeps_its_small_tables_and_its_biases_as_they_are() -> None:
    model = nn.ModuleDict(
        {"words": nn.Embedding(5000, 8), "positions": nn.Embedding(80, 8), "dense": nn.Linear(8, 4)}
    ).requires_grad_(False)
    bias = model["dense"].bias.clone()
    apply_quantization(model)
    assert isinstance(model["words"], RoundedEmbedding)
    assert type(model["positions"]) is nn.Embedding
    assert model["words"](torch.tensor([[1, 2]])).shape == (1, 2, 8)
    assert torch.equal(model["dense"].bias, bias)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_that_multiplies_what_it_looks_up_is_rounded_too(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    torch.manual_seed(0)
    table = GemmaTextScaledWordEmbedding(5000, 64, 0, embed_scale=3072**0.5).to(dtype).requires_grad_(False)
    ids = torch.arange(0, 5000, 7)
    expected = table(ids).float()
    model = nn.ModuleDict({"words": table})
    apply_quantization(model)
    assert isinstance(model["words"], RoundedEmbedding)
    found = model["words"](ids).float()
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()
    sizes = found.norm(dim=1)[1:] / expected.norm(dim=1)[1:]  # the first row is padding, and zero
    assert (sizes.mean() - 1).abs() < 5e-4  # the factor is rounded to 16 bits too, by 1.3e-3


def restore(rounded: RoundedWeight) -> NDArray[np.float32]:
    return rounded.numbers.astype(np.float32) * rounded.scales


@pytest.mark.parametrize(
    ("num_inputs", "group_size"),
    [
        (384, 64),
        (48, 16),  # the largest group that divides a row evenly
        (100, 100),  # groups of 4 would have more scales than they save
        (7, 7),
    ],
)
def test_no_number_is_further_from_its_weight_than_half_a_step(num_inputs: int, group_size: int) -> None:
    weight = np.random.default_rng(0).standard_normal((5, num_inputs)).astype(np.float32)
    rounded = round_linear(weight)
    assert rounded.numbers.shape == (5, num_inputs // group_size, group_size)
    error = np.abs(restore(rounded) - weight.reshape(rounded.numbers.shape))
    assert (error <= rounded.scales * 0.501).all()


def test_a_group_of_zeros_stays_zero() -> None:
    weight = np.zeros((2, 64), np.float32)
    assert not restore(round_linear(weight)).any()
    assert not restore(round_table(weight)).any()
