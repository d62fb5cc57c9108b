"""What of a model's directory is read, and with which words the rest is refused."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import read_card
from tests.rexuninlu import CPU, GOLDEN, MODELS, load
from vectormill.domain.errors import ModelError
from worker.devices.device import Device
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.tasks.extract.model.config import parse_switches, read_switches, tabulate_distances
from worker.tasks.extract.model.network import load_network
from worker.tasks.extract.prompts import PromptTokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "model", tmp_path / "model"))


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("name", MODELS)
def test_pickled_weights_are_the_same_network(name: str, tmp_path: Path) -> None:
    """The published model has no other."""
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load_network(folder, torch.float32, CPU).state_dict()
    assert loaded.keys() == load(name).state_dict().keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in load(name).state_dict().items())


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


def test_a_pickle_with_more_than_tensors_is_not_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"plm": Harmful()}))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        load_network(model, torch.float32, CPU)
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("ffnq.bias"), "ffnq.bias are missing"),
        (lambda tensors: tensors.pop("rotary_emb.freqs"), "rotary_emb.freqs are missing"),
        (lambda tensors: tensors.update({"plm.x": torch.zeros(1)}), "plm.x belong to no part of it"),
        (
            lambda tensors: tensors.update({"ffnk.bias": torch.zeros(3)}),
            "ffnk.bias have another shape",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None], words: str, model: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_network(model, torch.float32, CPU)


def test_numbers_of_positions_that_older_files_keep_are_passed_over(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["plm.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(tensors, model / "model.safetensors")
    load_network(model, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 64}, "sliding_window is not known"),
        ({"model_type": "deberta"}, "model_type is 'deberta'"),
        ({"relative_attention": False}, "relative_attention is False"),
        ({"pos_att_type": ["p2p"]}, "pos_att_type is"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({"z_steps": 2}, "z_steps is 2"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"conv_act": "mish"}, "conv_act is 'mish'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"attention_head_size": 7}, "attention_head_size is 7"),
        ({"hidden_size": "32"}, "hidden_size is '32', and has to be a whole number"),
        ({"vocab_size": "absent"}, "vocab_size is None"),
    ],
)
def test_switches_that_are_not_known_are_refused_by_name(
    changes: dict[str, Any], words: str, model: Path
) -> None:
    change_config(model, **changes)
    with pytest.raises(ModelError, match=words):
        read_switches(model)


def test_terms_of_positions_may_be_written_as_one_string(model: Path) -> None:
    before = read_switches(model)
    change_config(model, pos_att_type="c2p|p2c")
    assert read_switches(model) == before


def reference_buckets(distances: Tensor, buckets: int, longest: int) -> Tensor:
    """As transformers has it, in torch; an int of distances beyond `middle` in logarithmic steps."""
    middle = buckets // 2
    magnitude = torch.where(
        (distances < middle) & (distances > -middle), torch.tensor(middle - 1), distances.abs()
    )
    steps = torch.log(magnitude / middle) / torch.log(torch.tensor((longest - 1) / middle)) * (middle - 1)
    rounded = torch.ceil(steps) + middle
    return torch.where(magnitude <= middle, distances.float(), rounded * distances.sign()).long()


@pytest.mark.parametrize(("buckets", "longest"), [(32, 512), (256, 512), (256, 1024), (64, 128)])
def test_logarithmic_distances_are_the_references(buckets: int, longest: int) -> None:
    config = json.loads((GOLDEN / "model_b" / "config.json").read_text(encoding="utf-8"))
    switches = parse_switches(
        config | {"position_buckets": buckets, "max_relative_positions": longest}, "config.json"
    )
    wanted = reference_buckets(torch.arange(-512, 513), buckets, longest) + buckets
    found = tabulate_distances(switches, 512).tolist()
    assert found == wanted.clamp(0, 2 * buckets - 1).tolist()


def test_minus_one_means_no_logarithm_of_distances() -> None:
    """256 buckets, and the distances up to there as they are."""
    table = tabulate_distances(read_switches(GOLDEN / "model"), 512)
    assert table[512 - 256 : 512 + 256].tolist() == list(range(512))
    assert table[0] == 0
    assert table[-1] == 511


def test_without_buckets_every_distance_has_an_embedding(model: Path) -> None:
    change_config(model, position_buckets=-1)
    assert read_switches(model).span == 512
    change_config(model, max_relative_positions=100)
    assert read_switches(model).span == 100


def test_a_tokenizer_that_joins_pairs_otherwise_is_refused(model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    pair = tokenizer["post_processor"]["pair"]
    tokenizer["post_processor"]["pair"] = [*pair[:3], pair[2], *pair[3:]]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ModelError, match=r"another sequence than \[CLS\] first \[SEP\] second \[SEP\]"):
        PromptTokenizer(model)


def test_without_a_tokenizer_it_is_said_how_to_write_one(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="save_pretrained"):
        PromptTokenizer(model)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"backend": "openvino"}, "with torch alone, not with openvino"),
        ({"attention": "packed"}, "Packed attention cannot be used, because its disentangled attention"),
        ({"switches": "fused_qkv"}, "switch fused_qkv cannot be used"),
        ({"precision": "int8"}, "fp32 or bf16, not in int8"),
    ],
)
def test_a_wish_that_no_extraction_fulfils_is_refused_by_name(
    wish: dict[str, Any], words: str, tmp_path: Path
) -> None:
    device = Device("cpu", "cpu", 0, (), 1, 1 << 30)
    order = EncoderOrder(read_card(GOLDEN / "model"), device, "auto", "auto", 1, tmp_path)
    with pytest.raises(ModelError, match=words):
        load_encoder(replace(order, **wish))


def test_a_switch_of_ranks_is_for_other_models_of_the_same_worker(tmp_path: Path) -> None:
    device = Device("cpu", "cpu", 0, (), 1, 1 << 30)
    order = EncoderOrder(read_card(GOLDEN / "model"), device, "auto", "auto", 1, tmp_path)
    report = load_encoder(replace(order, switches="packed_ranks")).describe()
    assert (report.switches, report.precision.value) == ((), "fp32")


def test_prompts_have_no_more_ids_than_the_model_has_words() -> None:
    for name in MODELS:
        assert PromptTokenizer(GOLDEN / name).num_ids == read_switches(GOLDEN / name).vocab_size
