"""A converted network, compiled for some cores of a CPU, and its heads. Imports no torch."""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.models.model_card import ModelCard
from vectormill.models.poolings import MEAN
from vectormill.vectors.representations import SMALLEST_NORM
from worker.encoder.backends import CannotRun
from worker.encoder.choice import BF16, FP32, find_arithmetic
from worker.encoder.encoder import EncoderOrder
from worker.openvino.runtime import openvino as ov
from worker.openvino.word_table import EmbeddingRows
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

WORD_EMBEDDINGS: Final = "word_embeddings"  # the input that stands for a table
# The outputs.
VECTORS: Final = "vectors"  # [n, card.dimension]
STATES: Final = "states"  # [n, length, hidden size], which other outputs are made of


def list_outputs(card: ModelCard) -> tuple[str, ...]:
    """Return the outputs of a converted network, in order."""
    dense = (VECTORS,) if DENSE in card.outputs else ()
    return dense if card.outputs == (DENSE,) and not pools_passages(card) else (*dense, STATES)


def pools_passages(card: ModelCard) -> bool:
    """Return True if vectors are means of the network's states, and no module follows."""
    return DENSE in card.outputs and card.pooling == (MEAN,) and not card.dense and card.classifier is None


class ConversionFailed(CannotRun):
    """openvino cannot run this network with torch's results."""


class MappedWeights:
    """The bytes of a weight file, memory-mapped. Keep the object as long as the bytes are used."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # The array is only read, but openvino accepts no array that is marked read-only.
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)

    def forget(self) -> None:
        """Drop the pages that were read so far; the page cache supplies them again when they are used.

        Does nothing where the system does not support it.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


HINTS: Final = {FP32: "f32", BF16: "bf16"}


class OpenVINONetwork:
    """A converted network, compiled. Its inputs are `input_names`, in this order.

    It reads token_type_ids only after `read_types` was called, so that until then batches need none, and returns hidden
    states of a model that has only vectors after `give_states` was called.
    """

    def __init__(self, folder: Path, order: EncoderOrder, precision: str, num_streams: int) -> None:
        facts = json.loads((folder / "network.json").read_text(encoding="utf-8"))
        self.pad_token_id = int(facts["pad_token_id"])
        self.words = EmbeddingRows(folder / "words.bin", int(facts["word_embedding_dim"]))
        self._text = (folder / "network.xml").read_text(encoding="utf-8")
        # openvino would keep the whole file resident, and its matrices a second time in the layout of its
        # kernels. Of the file only positions are read again, and matrices when a new shape needs another
        # layout.
        self._weights = MappedWeights(folder / "network.bin")
        self._options = {
            # f32 is set explicitly: by default openvino takes the type that the CPU computes fastest.
            "INFERENCE_PRECISION_HINT": HINTS[find_arithmetic(precision, order.device)],
            # By default openvino also rounds activations to int8 if weights are compressed: 1.1 to 1.4 times
            # the speed where it was measured, but the smallest cosine falls from 0.9996 to 0.9983.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "NUM_STREAMS": str(num_streams),
            # How threads share a batch could change bits.
            "INFERENCE_NUM_THREADS": str(num_streams if order.is_reproducible else order.num_threads),
            # The process is pinned to its cores from outside, because openvino cannot see what other workers
            # use.
            "ENABLE_CPU_PINNING": "NO",
        }
        self.num_bytes = self._weights.bytes.nbytes + self.words.num_bytes
        self.has_types = TOKEN_TYPE_IDS in facts["inputs"]
        # A reproducible worker must never compile a second graph, which could round otherwise.
        self.gives_states = order.card.outputs != (DENSE,) or order.is_reproducible
        self._compile(reads_types=False)

    def _compile(self, *, reads_types: bool) -> None:
        core = ov.Core()
        model = core.read_model(self._text, ov.Tensor(self._weights.bytes, shared_memory=True))
        if self.has_types and not reads_types:
            replace_types(model)
        if not self.gives_states and len(results := model.get_results()) > 1:
            model.remove_result(results[1])
        self._compiled = core.compile_model(model, "CPU", self._options)
        self.input_names = tuple(port.get_any_name() for port in self._compiled.inputs)
        self.forget_weights()

    @property
    def reads_types(self) -> bool:
        return TOKEN_TYPE_IDS in self.input_names

    def read_types(self) -> None:
        """Read token types from now on. Invalidates existing requests.

        Raises ValueError if the model has no such input.
        """
        if not self.has_types:
            raise ValueError("This model does not read token_type_ids.")
        self._compile(reads_types=True)

    def give_states(self) -> None:
        """Return hidden states too from now on. Invalidates existing requests."""
        self.gives_states = True
        self._compile(reads_types=self.reads_types)

    def make_request(self) -> Any:
        """Return an inference request, with its own buffers, for one batch at a time."""
        return self._compiled.create_infer_request()

    def forget_weights(self) -> None:
        self._weights.forget()

    def release_memory(self) -> None:
        """Free the memory of all requests. openvino refuses if any of them is running."""
        self._compiled.release_memory()


def replace_types(model: Any) -> None:
    """Replace the graph's token_type_ids input by zeros, the types of a single text."""
    parameter = model.input(TOKEN_TYPE_IDS).get_node()
    shape = ov.opset13.shape_of(model.input(INPUT_IDS).get_node())
    zeros = ov.opset13.broadcast(ov.opset13.constant(0, ov.Type.i64), shape)
    for target in parameter.output(0).get_target_inputs():
        target.replace_source_output(zeros.output(0))
    model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()


HEADS_FILE: Final = "heads.npz"

Layer = tuple[NDArray[np.float32], NDArray[np.float32]]  # a weight [out, in] and a bias [out]


def save_heads(folder: Path, heads: Mapping[str, list[Layer]]) -> None:
    """Write the layers of each head, by the output that it makes."""
    arrays = {
        f"{name}/{number}/{part}": values
        for name, layers in heads.items()
        for number, layer in enumerate(layers)
        for part, values in zip(("weight", "bias"), layer, strict=True)
    }
    np.savez(folder / HEADS_FILE, allow_pickle=False, **arrays)


class LinearHeads:
    """The linear heads that `save_heads` wrote, computed by NumPy from the network's hidden states.

    For a batch they take about a hundredth of the network's time, and unlike openvino NumPy keeps nothing for each
    number of tokens.
    """

    def __init__(self, folder: Path, card: ModelCard) -> None:
        self._normalizes = card.token_head is not None and card.token_head.normalizes
        self._layers: dict[str, list[Layer]] = {}
        with np.load(folder / HEADS_FILE) as arrays:
            for name in (SPARSE, MULTI_VECTOR):
                count = sum(key.startswith(f"{name}/") for key in arrays) // 2
                self._layers[name] = [
                    (arrays[f"{name}/{number}/weight"], arrays[f"{name}/{number}/bias"])
                    for number in range(count)
                ]

    def compute(self, name: str, states: NDArray[np.float32]) -> NDArray[np.float32 | np.float16]:
        """Return what worker.model.heads returns for states [tokens, hidden size]."""
        values = states
        for weight, bias in self._layers[name]:
            values = values @ weight.T + bias
        if name == SPARSE:
            return np.maximum(values, 0)
        if self._normalizes:
            values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), SMALLEST_NORM)
        return values.astype(np.float16)
