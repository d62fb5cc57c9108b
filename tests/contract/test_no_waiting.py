"""No forward pass asks the device anything: the host would wait for all that was queued before, and queue nothing more.

Strategies that share a model are held to it in tests/contract/rank_program.py.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests import gliner_models
from tests.contract.packed_models import MODELS, PADDED_MODELS, TOKENIZER, make_sequences, make_transformer
from tests.contract.waits import RefusesWaiting
from tests.models import packaged_model, read_card
from tests.representations import write_masked_language_model
from tests.rexuninlu import GOLDEN, extract_of, find_case, load
from vectormill.models.families import FAMILIES
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from vectormill.settings import ModelEntry
from worker.batching.batch import OUTPUTS, Batch
from worker.devices.device import CPU, CUDA, Device
from worker.encoder import outputs
from worker.encoder.backends import load_encoder
from worker.encoder.choice import read_attention_shape
from worker.encoder.encoder import Choice, EncoderOrder
from worker.encoder.padding import pad_batch
from worker.model import cuda_pass
from worker.model.cuda_pass import copy_inputs
from worker.model.forms import PackedForm, lay_out_outputs
from worker.model.masks import find_attention_mask, make_log_bucket_position, tell_masks
from worker.model.network import EncoderNetwork, list_token_inputs
from worker.model.packed import PackedNetwork, make_attention
from worker.model.torch_encoder import TorchEncoder
from worker.tasks.extract.extract import name_inputs
from worker.tasks.extract.gliner import Gliner
from worker.tasks.extract.model import encoder as extraction
from worker.tasks.extract.model.encoder import ExtractionEncoder
from worker.tasks.extract.model.head import find_cells, pad_inputs
from worker.tasks.extract.model.network import RexNetwork

DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
STUB = "vectormill_stub"
POOLINGS = "mean+last_token"
ALL_MODELS = [name for name in (*MODELS, *PADDED_MODELS) if FAMILIES[name.partition(",")[0]].never_waits]
BATCHES = {
    "padded": Batch.from_ids(make_sequences()),
    "padded, with a prompt": Batch.from_ids(make_sequences(), [2, *[0] * (len(make_sequences()) - 1)]),
    "of one length": Batch.from_ids([np.arange(5, 25, dtype=np.int32)] * 3),
    "one text": Batch.from_ids([np.arange(5, 25, dtype=np.int32)]),
}


def save_model(directory: Path, name: str) -> ModelCard:
    make_transformer(name).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(TOKENIZER)
    return read_model_card(name, directory, ModelEntry(path=name, pooling=POOLINGS))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_no_padded_pass_waits_for_the_device(name: str, tmp_path: Path) -> None:
    card = save_model(tmp_path, name)
    order = EncoderOrder(card, DEVICE, "torch", "fp32", 1, tmp_path)
    encoder = TorchEncoder(order, Choice("torch", "for tests"), Choice("fp32", "for tests"))
    for batch in BATCHES.values():
        with RefusesWaiting():
            results = encoder.encode(batch)
        assert np.isfinite(results.matrix).all()


@pytest.mark.parametrize("name", ALL_MODELS)
def test_no_padded_pass_reads_what_is_on_the_device(name: str, tmp_path: Path) -> None:
    """On the meta device there is nothing to be read, so `tolist` and `numpy` fail too, which no operation shows."""
    card = save_model(tmp_path, name)
    network = EncoderNetwork(card, torch.float32)
    network.to("meta")
    for batch in BATCHES.values():
        padded = pad_batch(batch, network.pad_token_id)
        mask = find_attention_mask(padded, network.transformer.config)
        arrays = [padded.input_ids, padded.pool_mask] + ([] if mask is None else [mask])
        ids, pool_mask, *masks = (torch.from_numpy(array).to("meta") for array in arrays)
        with torch.inference_mode(), RefusesWaiting():
            vectors = network(ids, masks[0] if masks else None, pool_mask)
        assert vectors.shape == (len(batch), card.dimension)


def test_the_buckets_of_relative_positions_are_those_of_transformers() -> None:
    from transformers.models.deberta_v2 import modeling_deberta_v2 as code

    spec = importlib.util.find_spec(code.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh: Any = importlib.util.module_from_spec(
        spec
    )  # another test may have loaded a model, which replaces it
    spec.loader.exec_module(fresh)
    theirs = fresh.make_log_bucket_position
    for bucket_size, max_position in ((256, 512), (16, 80), (32, 40)):
        distances = torch.arange(-2 * max_position, 2 * max_position)
        expected = theirs(distances, bucket_size, max_position)
        assert torch.equal(make_log_bucket_position(distances, bucket_size, max_position), expected)
    tell_masks(make_transformer("deberta-v2"))
    assert code.make_log_bucket_position is make_log_bucket_position
    there = torch.arange(-80, 80, device="meta")
    with pytest.raises(AssertionError, match="copies from the host"), RefusesWaiting():
        theirs(there, 16, 80)


@pytest.mark.parametrize("name", MODELS)
def test_no_packed_pass_waits_for_the_device(name: str, tmp_path: Path) -> None:
    def attend_to_oneself(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query.contiguous()  # the kernel itself runs on CUDA alone

    AttentionInterface.register(STUB, make_attention(attend_to_oneself))
    card = save_model(tmp_path, name)
    network = EncoderNetwork(card, torch.float32)
    transformer = PackedNetwork(network, STUB).transformer
    shape = read_attention_shape(transformer.config)
    form = PackedForm(transformer, list_token_inputs(transformer), network.modes, shape, STUB)
    for batch in BATCHES.values():
        part = form.lay_out(batch)
        tensors = {name: torch.from_numpy(array) for name, array in part.arrays.items()}
        with torch.inference_mode(), RefusesWaiting():
            network.dense(form.pool(form.run(part, tensors, None), tensors))


SMALL_BERT = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    "write",
    [
        lambda directory: write_random_embedder(SMALL, packaged_model(), directory),
        lambda directory: write_masked_language_model(directory, "Bert", **SMALL_BERT),
    ],
    ids=["bge-m3", "splade"],
)
def test_no_head_waits_for_the_device_or_reads_what_is_there(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    card = read_card(write(tmp_path / "splade"))
    order = EncoderOrder(card, DEVICE, "torch", "fp32", 1, tmp_path)
    encoder = TorchEncoder(order, Choice("torch", "for tests"), Choice("fp32", "for tests"))
    encoder._network.to("meta")
    sequences = make_sequences()
    for bits in (outputs.find_bits(card.outputs), *(outputs.BITS[name] for name in card.outputs)):
        wishes = np.array([bits, *[outputs.BITS[card.outputs[0]]] * (len(sequences) - 1)], np.int32)
        batch = Batch({**Batch.from_ids(sequences).inputs, OUTPUTS: Ragged.from_scalars(wishes)})
        part, wanted = lay_out_outputs(encoder._form, batch, card)
        assert wanted is not None
        arrays = [torch.from_numpy(array).to("meta") for array in part.arrays.values()]
        with torch.inference_mode(), RefusesWaiting():
            assert len(encoder._compute(part, wanted, *arrays))


EXTRACTORS = {
    "rexuninlu": GOLDEN / "model",
    "gliner, deberta": gliner_models.GOLDEN / "deberta",
    "gliner, bert": gliner_models.GOLDEN / "bert",
}


def make_extraction_batch(name: str = "rexuninlu") -> Batch:
    if name.startswith("gliner"):
        known = gliner_models.KNOWN
        gliner, schema = Gliner(read_card(EXTRACTORS[name])), dict.fromkeys(known["labels"])
        prompts = gliner.begin(schema, known["texts"], with_confidences=False).start()
    else:
        prompts = extract_of(find_case("ee_biz")).start()
    assert prompts is not None
    return Batch(name_inputs(prompts).inputs)


def load_extractor(name: str, tmp_path: Path) -> ExtractionEncoder:
    encoder = load_encoder(EncoderOrder(read_card(EXTRACTORS[name]), DEVICE, "torch", "fp32", 1, tmp_path))
    assert isinstance(encoder, ExtractionEncoder)
    return encoder


@pytest.mark.parametrize("name", EXTRACTORS)
def test_no_extraction_waits_for_the_device_or_reads_what_is_there(name: str, tmp_path: Path) -> None:
    there = torch.device("meta")
    encoder, batch = load_extractor(name, tmp_path), make_extraction_batch(name)
    network = encoder._network
    if isinstance(network, RexNetwork):
        network.prepare(there, lambda part: part.to(there))
    network.to(there)
    arrays = encoder.lay_out(network, batch)
    with torch.inference_mode(), RefusesWaiting(there.type):
        tensors = dict(zip(arrays, copy_inputs(list(arrays.values()), there), strict=True))
        numbers = encoder.compute(network, tensors, batch, 100)
    assert numbers.shape == (2 * len(batch) + 4 * 100,)
    assert not encoder.describe().is_queued, "on a CPU nothing is"
    assert encoder.never_waits


@pytest.mark.parametrize(("cells_a_token", "num_passes"), [(100, 1), (0, 2)])
@pytest.mark.parametrize("name", EXTRACTORS)
def test_a_queued_extraction_has_the_cells_of_one_that_is_waited_for_however_many_they_are(
    name: str, cells_a_token: int, num_passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    class PassHere:
        """Stands for CudaPass, which computes nothing without CUDA."""

        def __init__(self, inputs: Any, compute: Any, device: Any, stream: Any, lay_out: Any) -> None:
            self._inputs, self._compute, self._lay_out = inputs, compute, lay_out

        def start(self) -> None:
            passes.append(self)
            with torch.inference_mode():
                self._numbers = self._compute(*[torch.from_numpy(array) for array in self._inputs]).numpy()

        def results(self) -> Ragged:
            rows: Ragged = self._lay_out(self._numbers)
            return rows

    encoder, batch = load_extractor(name, tmp_path), make_extraction_batch(name)
    expected = encoder.encode(batch)
    assert expected.lengths.max() > 1
    monkeypatch.setattr(extraction, "CudaPass", PassHere)
    monkeypatch.setattr(extraction, "CELLS_A_TOKEN", cells_a_token)
    monkeypatch.setattr(encoder, "_stream", object())
    found = encoder.encode(batch)
    assert len(passes) == num_passes
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.covered.tobytes() == expected.covered.tobytes()


def test_the_host_asks_twice_for_an_extraction_s_cells_how_many_and_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = torch.device(CPU)
    network, inputs = load("model"), pad_inputs(make_extraction_batch(), here)
    asked: list[str] = []

    def note(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)

    with torch.inference_mode():
        logits = network(**inputs.tokens, is_token=inputs.is_token)
        for name in ("nonzero", "cpu", "item", "tolist"):
            note(name)
        find_cells(logits, inputs)
    assert asked == ["nonzero", "cpu"]


def test_what_may_be_queued_is_what_was_found_not_to_wait() -> None:
    waitless = {name for name, family in FAMILIES.items() if family.never_waits}
    assert {name.partition(",")[0] for name in ALL_MODELS} == waitless
    assert waitless >= {name for name, family in FAMILIES.items() if family.positions}


def test_a_wait_inside_a_pass_is_found() -> None:
    mask = torch.ones(3)
    for ask in (
        lambda: mask.all().item(),
        lambda: bool(mask.all()),
        lambda: mask.nonzero(),
        lambda: mask[mask > 0],
        lambda: mask.repeat_interleave(mask.long()),
    ):
        with pytest.raises(AssertionError, match="wait"), RefusesWaiting():
            ask()


def test_a_copy_from_the_host_inside_a_pass_is_found() -> None:
    there = torch.ones(3, device="meta")
    for copy in (
        lambda: torch.tensor(1.0).type_as(there),
        lambda: torch.ones(3).to("meta"),
        lambda: there.copy_(torch.ones(3)),
        lambda: there[torch.tensor([0, 2])],
    ):
        for is_inference in (True, False):
            with (
                pytest.raises(AssertionError, match="waits"),
                torch.inference_mode(is_inference),
                RefusesWaiting(),
            ):
                copy()  # type: ignore[no-untyped-call]
    with RefusesWaiting():
        torch.ones(3).to("meta", non_blocking=True)
        there.to(torch.float16)


def test_inputs_go_to_a_gpu_in_one_pinned_copy_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Host:
        def to(self, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
            asked.append((device.type, non_blocking))
            return torch.arange(10)

    def join(inputs: object, *, pin_memory: bool) -> Host:
        asked.append(pin_memory)
        return Host()

    monkeypatch.setattr(cuda_pass, "join_inputs", join)
    arrays = [np.zeros((2, 3), np.int64), np.zeros((2, 2), np.int64)]
    first, second = cuda_pass.copy_inputs(arrays, torch.device(CUDA))
    assert asked == [True, (CUDA, True)]
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[6, 7], [8, 9]])
