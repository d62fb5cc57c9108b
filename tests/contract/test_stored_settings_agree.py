"""Each setting that sentence-transformers stores gives its results here, or a refusal that names the file and the key.

Each argument that its classes take, and each value of those that are chosen from a set, is given to a small model of
random weights, which the library saves and loads again. The table of arguments is compared with the library's
signatures: an argument that a release adds fails here until it has a row.
"""

import inspect
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.base.modules.transformer import TRANSFORMER_TASK_TO_AUTO_MODEL
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from torch import nn

from tests.contract.saved_models import (
    Build,
    Small,
    change,
    write_auto_encoder,
    write_behind_pooling,
    write_classifier,
    write_classifying_transformer,
    write_colbert,
    write_colbert_transformer,
    write_dense,
    write_embedder,
    write_logit_score,
    write_mask,
    write_normalize,
    write_old_splade,
    write_pooling,
    write_router,
    write_scoring_dense,
    write_sparse_static,
    write_splade,
    write_splade_pooling,
    write_splade_transformer,
    write_static,
    write_token_pooling,
    write_transformer_module,
)
from tests.contract.small_models import HIDDEN_SIZE, PAIRS, TEXTS, make_tokenizer
from tests.models import DEVICE
from tests.processors import without_bf16
from tests.rounds import ask as ask_task
from tests.rounds import finish
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.domain.task import DENSE, EMBED, JUDGE
from vectormill.jobs.item import TOO_MANY_TOKENS, join_pair
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import find_own_task, make_spec
from vectormill.ragged import Ragged
from vectormill.vectors.representations import unpack
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.model.network import Dense as OurDense
from worker.tasks.score import activate
from worker.tasks.table import make_tasks
from worker.tokens.tokenizer import LIBRARY_CORES

ENCODER_FILE: Final = "config_sentence_transformers.json"
TRANSFORMER_FILE: Final = "sentence_bert_config.json"
TOKENIZER_FILE: Final = "tokenizer_config.json"
# The results of some texts, a row for each.
Rows = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    """A value that is stored in place of the default, with the arguments that it needs `beside` it.

    What the constructor does not store, but the loader reads, is `written` into the module's file: then `value` is
    what stands there. `no_effect` says why the library computes the same with the value. The smallest cosine that is
    allowed is `least`.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    written: bool = False
    no_effect: str = ""
    least: float = 0.9999

    @property
    def name(self) -> str:
        """Return the value in words that are the same in each process; what is no JSON is told by its type."""
        is_plain = self.value is None or isinstance(
            self.value, bool | int | float | str | list | tuple | dict
        )
        return (
            f"{self.value!r:.60}"
            if is_plain and " at 0x" not in repr(self.value)
            else type(self.value).__name__
        )


@dataclass(frozen=True)
class Arguments:
    """How a class of the library becomes part of a saved model, the file it is stored in, and its arguments' cases.

    An argument without cases has the reason instead.
    """

    build: Build
    file: str
    cases: Mapping[str, Sequence[Case] | str]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The library logs each progress and each odd value."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# --- The table.

NOT_STORED: Final = "says how the library runs a model, which is not stored"
A_PATH: Final = "a path, from which the model is read before it is saved"
IN_WEIGHTS: Final = "its numbers are stored as weights"
A_SIZE: Final = "a size, which the other modules determine"


def make_truncating(*, max_length: int, **options: Any) -> Any:
    """Return a tokenizer that truncates by itself."""
    tokenizer = make_tokenizer()._tokenizer
    tokenizer.enable_truncation(max_length, **options)
    return tokenizer


class OwnActivation(nn.Module):
    """An activation that only the author of a model has."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sin()


SHORT: Final = {"max_length": 12}
EXPANSION: Final = {"strategy": "fixed", "length": 20}
IS_TEXT: Final = "it is about no texts"
# This reason means that the value has an effect in other kinds of models, or beside other settings.
MAY_BE: Final = "not here, but elsewhere"
IS_MASKED: Final = "padding is masked out"
# Settings of the first module of any model, whatever follows.
TRANSFORMER_CASES: Final[Mapping[str, Sequence[Case] | str]] = {
    "model_name_or_path": A_PATH,
    "transformer_task": [
        Case("retrieval", written=True, no_effect="the class that the checkpoint names"),
        Case("any-to-any", written=True),
        Case("no-such-task", written=True),
    ],
    "model_kwargs": [
        Case({"attn_implementation": "eager"}, written=True, no_effect="the same arithmetic"),
        Case({"dtype": "bfloat16"}, written=True, least=0.99),
        Case({"add_pooling_layer": False}, written=True, no_effect="it is not read"),
    ],
    "processor_kwargs": [
        Case({"model_max_length": 12}, written=True),
        Case({"truncation_side": "left"}, written=True),
        Case({"padding_side": "left"}, written=True, no_effect=IS_MASKED),
        Case({"truncation_side": "left"}),
        Case({"padding_side": "left"}, no_effect=IS_MASKED),
        Case({"model_max_length": 12}),
    ],
    "config_kwargs": [
        Case({"num_hidden_layers": 1}, written=True),
        Case({"hidden_act": "relu"}, written=True),
    ],
    "processing_kwargs": [
        Case({"text": {"max_length": 12, "truncation": True}}),
        Case({"text": SHORT}),
        Case({"common": SHORT}),
        Case({"text": {"truncation": "only_first", "max_length": 12}}),
        Case({"text": {"padding": "max_length", "max_length": 30}}),
        Case({"text": {"padding": "max_length"}}, no_effect=IS_MASKED),
        Case({"text": {"pad_to_multiple_of": 8}}, no_effect=IS_MASKED),
        Case({"text": {"add_special_tokens": False}}),
        Case({"text": {"padding_side": "left"}}, no_effect=IS_MASKED),
        Case({"text": {"truncation": False}}, no_effect=MAY_BE),
        Case({"text": {"truncation": False, "max_length": 12}}, no_effect=MAY_BE),
        Case({"text": {"truncation": "do_not_truncate"}}, no_effect=MAY_BE),
        Case({"text": {"logits_to_keep": 0}}, no_effect="only a causal model reads it"),
        Case({"text": {"return_token_type_ids": False}}, no_effect=MAY_BE),
        Case({"text": {"split_special_tokens": True}}, no_effect="no text has a special token"),
        Case({"text": {"no_such_option": True}}, no_effect=MAY_BE),
        Case({"audio": {"padding": False}}, no_effect=IS_TEXT),
        Case({"chat_template": {"add_generation_prompt": True}}, no_effect="there is no chat"),
    ],
    "backend": NOT_STORED,
    "modality_config": [
        Case(
            {"text": {"method": "forward", "method_output_name": "pooler_output"}},
            beside={"module_output_name": "sentence_embedding"},
        ),
        Case({"text": {"method": "get_input_embeddings", "method_output_name": None}}, written=True),
    ],
    "module_output_name": [Case("all_embeddings", written=True)],
    "unpad_inputs": [
        Case(True, no_effect="there is no such kernel on a CPU"),
        Case(False, no_effect="it is the default here"),
    ],
    "query_length": [Case(12)],
    "document_length": [Case(12)],
    "query_expansion": [
        Case({**EXPANSION, "strategy": strategy, "attend": attend, "token": token}, no_effect=MAY_BE)
        for strategy in ("fixed", "min")
        for attend in (False, True)
        for token in (None, "[unused1]")
    ],
    "max_seq_length": [Case(12), Case(12, written=True)],
    "do_lower_case": [Case(True), Case(True, written=True)],
    "tokenizer_name_or_path": [Case("no/such-tokenizer", written=True)],
}
OLD_NAMES: Final = {
    "model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs",
}  # fmt: skip
NOT_STORED_OF_MODELS: Final = dict.fromkeys(
    (
        "device", "cache_folder", "trust_remote_code", "revision", "local_files_only", "token", "model_card_data",
        "backend", "model_kwargs", "processor_kwargs", "config_kwargs",
    ),
    NOT_STORED,
)  # fmt: skip
OF_ANY_MODEL: Final[Mapping[str, Sequence[Case] | str]] = {
    **NOT_STORED_OF_MODELS,
    "model_name_or_path": A_PATH,
    "modules": "are the other classes of this table",
    "prompts": [
        Case({"query": "Find it: ", "document": ""}),
        Case({"passage": "passage: ", "query": "query: "}),
        Case({}),
    ],
    "default_prompt_name": [Case("query")],
}
CLASSES: Final[Mapping[type, Arguments]] = {
    Transformer: Arguments(
        write_transformer_module,
        TRANSFORMER_FILE,
        {
            **TRANSFORMER_CASES,
            "transformer_task": [
                *TRANSFORMER_CASES["transformer_task"],
                Case(
                    "fill-mask", beside={"model_name_or_path": partial(Small.transformer, "BertForMaskedLM")}
                ),
                Case("text-generation", written=True),
                Case("sequence-classification", written=True),
            ],
        },
    ),
    Pooling: Arguments(
        write_pooling,
        "1_Pooling",
        {
            "embedding_dimension": [Case(16, no_effect="only what follows is told of it")],
            "pooling_mode": [
                *(Case(mode) for mode in Pooling.POOLING_MODES if mode != "mean"),
                Case(("mean",), no_effect="it is the default"),
                Case(Pooling.POOLING_MODES),
                Case(Pooling.POOLING_MODES[::-1]),
                Case(("mean", "mean")),
            ],
            "include_prompt": [Case(False, beside={"pooling_mode": Pooling.POOLING_MODES})],
        },
    ),
    Dense: Arguments(
        write_dense,
        "_Dense",
        {
            "in_features": A_SIZE,
            "out_features": [Case(7), Case(HIDDEN_SIZE), Case(1)],
            "bias": [Case(False)],
            "activation_function": [
                *map(Case, (None, nn.ReLU(), nn.PReLU(), nn.GLU())),
                Case(OwnActivation(), no_effect="the library takes its default"),
            ],
            "init_weight": IN_WEIGHTS,
            "init_bias": IN_WEIGHTS,
            "module_input_name": [
                Case("token_embeddings"),
                Case("token_embeddings", beside={"place": 1}, no_effect=MAY_BE),
            ],
            "module_output_name": [
                Case("other"),
                Case("token_embeddings"),
                Case("sentence_embedding", no_effect="it is the default"),
                Case("scores"),
            ],
            "use_residual": [Case(True), Case(True, beside={"out_features": HIDDEN_SIZE})],
        },
    ),
    Normalize: Arguments(
        write_normalize,
        "_Normalize",
        {
            "module_input_name": [
                Case("token_embeddings"),
                Case("token_embeddings", beside={"place": 1}),
                Case("sentence_embedding", beside={"place": 2, "dense": True}, no_effect="it is the default"),
                Case("sentence_embedding", beside={"place": 3, "dense": True}, no_effect="it is the default"),
            ],
            "module_output_name": [Case("other")],
        },
    ),
    LayerNorm: Arguments(
        partial(write_behind_pooling, LayerNorm), "modules.json", {"dimension": [Case(HIDDEN_SIZE)]}
    ),
    Dropout: Arguments(
        partial(write_behind_pooling, Dropout),
        "modules.json",
        {"dropout": [Case(0.9, no_effect="it is for training alone")]},
    ),
    StaticEmbedding: Arguments(
        write_static,
        "tokenizer.json",
        {
            "tokenizer": [
                Case(partial(make_truncating, max_length=12)),
                Case(partial(make_truncating, max_length=12, direction="left")),
                Case(partial(make_truncating, max_length=12, stride=2)),
                Case(partial(make_truncating, max_length=12, strategy="only_first")),
                Case(partial(make_truncating, max_length=12, strategy="only_second"), no_effect=MAY_BE),
            ],
            "embedding_weights": [
                Case(torch.randn(2000, 16, generator=torch.Generator().manual_seed(2)).half(), least=0.999),
                Case(torch.randn(2000, 16, generator=torch.Generator().manual_seed(2)).double()),
            ],
            "embedding_dim": [
                Case(24),
                Case(8, beside={"behind": [Normalize()]}),
                Case(8, beside={"behind": [Dense(8, 8)]}, no_effect=MAY_BE),
            ],
            "kwargs": NOT_STORED,
        },
    ),
    Router: Arguments(
        write_router,
        "modules.json",
        {
            "sub_modules": "are the other classes of this table",
            "default_route": [Case("document")],
            "allow_empty_key": [Case(False, no_effect=MAY_BE)],
            "route_mappings": [Case({("query", "text"): "document"})],
        },
    ),
    SpladePooling: Arguments(
        write_splade_pooling,
        "1_SpladePooling",
        {
            "pooling_strategy": [Case("sum")],
            "activation_function": [Case("log1p_relu")],
            "embedding_dimension": [Case(16, no_effect="only what follows is told of it")],
            "chunk_size": [Case(3, no_effect="it only saves memory")],
        },
    ),
    MLMTransformer: Arguments(
        write_old_splade,
        TRANSFORMER_FILE,
        {"args": A_PATH, "_from_auto_load": NOT_STORED, "kwargs": "are those of Transformer"},
    ),
    SparseStaticEmbedding: Arguments(
        write_sparse_static,
        "modules.json",
        {
            "tokenizer": [Case(partial(make_tokenizer, model_max_length=4))],
            "weight": [Case(None)],
            "frozen": [Case(True, no_effect="it is about training")],
        },
    ),
    SparseAutoEncoder: Arguments(
        write_auto_encoder,
        "modules.json",
        {
            "input_dim": A_SIZE,
            "hidden_dim": [Case(48)],
            "k": [Case(4)],
            "k_aux": [Case(16, no_effect="it is about training")],
            "normalize": [Case(True)],
            "dead_threshold": [Case(3, no_effect="it is about training")],
        },
    ),
    MultiVectorMask: Arguments(
        write_mask,
        "2_MultiVectorMask",
        {
            "skiplist_words": [Case([".", "!", "the", "no such word"])],
            "skiplist_tasks": [
                Case(tasks, beside={"skiplist_words": ["!", "the", "?"]})
                for tasks in ("query", ["query", "document"], [])
            ],
            "keep_only_token_ids": [Case([*range(20, 60)]), Case([], no_effect="it is the default")],
        },
    ),
    HierarchicalTokenPooling: Arguments(
        write_token_pooling,
        "modules.json",
        {
            "pool_factor": [Case(3.0, no_effect=MAY_BE)],
            "num_protected_tokens": [Case(0)],
            "normalize_embeddings": [Case(False, no_effect=MAY_BE)],
            "tasks": [Case(["query", "document"])],
        },
    ),
    LogitScore: Arguments(
        write_logit_score,
        "1_LogitScore",
        {
            "true_token_id": [Case(302)],
            "false_token_id": [Case(None), Case(303)],
            "module_input_name": [Case("other_logits", written=True)],
        },
    ),
    SentenceTransformer: Arguments(
        write_embedder,
        ENCODER_FILE,
        {
            **OF_ANY_MODEL,
            "use_auth_token": NOT_STORED,
            "similarity_fn_name": [
                Case(name, no_effect="it is about comparing vectors")
                for name in ("dot", "euclidean", "manhattan")
            ],
            "truncate_dim": [
                Case(8),
                Case(1),
                Case(HIDDEN_SIZE, no_effect="all of them"),
                Case(64, no_effect="more"),
            ],
        },
    ),
    SparseEncoder: Arguments(
        write_splade,
        ENCODER_FILE,
        {
            **OF_ANY_MODEL,
            "similarity_fn_name": [Case("cosine", no_effect="it is about comparing vectors")],
            "max_active_dims": [Case(8)],
        },
    ),
    MultiVectorEncoder: Arguments(
        write_colbert,
        ENCODER_FILE,
        {
            **OF_ANY_MODEL,
            "default_prompt_name": [Case("query", no_effect="queries and documents have their own")],
            "similarity_fn_name": [Case("maxsim", no_effect="it is the default")],
        },
    ),
    CrossEncoder: Arguments(
        write_classifier,
        ENCODER_FILE,
        {
            **OF_ANY_MODEL,
            "num_labels": [Case(3), Case(2, beside={"activation_fn": nn.Identity()})],
            "max_length": [Case(12)],
            "activation_fn": [
                *map(Case, (nn.Identity(), nn.Tanh())),
                Case(OwnActivation(), no_effect="the library takes its default"),
                Case(nn.Softmax(dim=-1), beside={"num_labels": 3}),
                Case(nn.Sigmoid(), beside={"num_labels": 3}),
                Case(nn.Tanh(), beside={"num_labels": 3}),
            ],
            "keep_in_fp32_modules": [Case(["0.model.classifier"], no_effect="all of it is fp32")],
        },
    ),
}

# These keys are written into the files of a saved model, because the loader reads more than constructors store.
OLD_FLAGS: Final = (
    "cls_token",
    "max_tokens",
    "mean_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)


@dataclass(frozen=True)
class Written:
    """Keys of a file that no constructor has as an argument, or an old release wrote, with their values."""

    build: Build
    file: str
    changes: Mapping[str, Any]
    no_effect: str = ""


def write_old_pooling(directory: Path) -> None:
    """Leave the keys to be written."""
    write_pooling(directory)
    (directory / "1_Pooling" / "config.json").write_text("{}")


OLD_POOLINGS: Final = [
    {f"pooling_mode_{flag}": flag in chosen for flag in OLD_FLAGS} | {"word_embedding_dimension": HIDDEN_SIZE}
    for chosen in (*((flag,) for flag in OLD_FLAGS), OLD_FLAGS, OLD_FLAGS[:3], ())
]
UNKNOWN: Final = {"no_such_key": 3}
WRITTEN: Final = (
    Written(
        write_transformer_module,
        TRANSFORMER_FILE,
        {"model_args": {"attn_implementation": "eager"}},
        "as fast",
    ),
    Written(write_transformer_module, TRANSFORMER_FILE, {"tokenizer_args": {"model_max_length": 12}}),
    Written(write_transformer_module, TRANSFORMER_FILE, {"config_args": {"num_hidden_layers": 1}}),
    Written(write_transformer_module, TRANSFORMER_FILE, {"max_seq_length": None}, "it is the default"),
    *(Written(write_old_pooling, "1_Pooling", told, "compared with nothing") for told in OLD_POOLINGS),
    Written(
        write_splade_pooling, "1_SpladePooling", {"word_embedding_dimension": 7}, "only what follows is told"
    ),
    Written(write_embedder, ENCODER_FILE, {"requirements": {"sentence_transformers": ">=5"}}, "it is met"),
    *(
        Written(write_embedder, TOKENIZER_FILE, told)
        for told in ({"truncation_side": "left"}, {"model_max_length": 12})
    ),
    Written(write_embedder, TOKENIZER_FILE, {"padding_side": "left"}, IS_MASKED),
    Written(write_classifier, TOKENIZER_FILE, {"truncation_side": "left"}),
    Written(write_classifier, TOKENIZER_FILE, {"model_max_length": 12}),
    Written(write_classifier, TOKENIZER_FILE, {"model_input_names": ["input_ids", "attention_mask"]}),
    Written(write_splade, TOKENIZER_FILE, {"truncation_side": "left"}),
    Written(write_colbert, TOKENIZER_FILE, {"truncation_side": "left"}),
    Written(write_colbert, TOKENIZER_FILE, {"padding_side": "left"}, IS_MASKED),
    Written(
        write_classifier,
        "config.json",
        {"problem_type": "multi_label_classification"},
        "it is about training",
    ),
    *(
        Written(build, file, UNKNOWN, "no release reads it")
        for build, file in (
            (write_transformer_module, TRANSFORMER_FILE),
            (write_pooling, "1_Pooling"),
            (write_dense, "2_Dense"),
            (partial(write_normalize), "2_Normalize"),
            (write_embedder, ENCODER_FILE),
            (write_embedder, "modules.json"),
            (write_splade_pooling, "1_SpladePooling"),
            (write_mask, "2_MultiVectorMask"),
            (write_logit_score, "1_LogitScore"),
        )
    ),
)


# --- Both sides.


class LibraryFails(Exception):
    """Says that the library loads no such model."""


KINDS: Final = {
    each.model_type: each for each in (SentenceTransformer, SparseEncoder, MultiVectorEncoder, CrossEncoder)
}
Answers = dict[str | None, list[NDArray[np.float32] | None]]


def ask_library(directory: Path) -> Answers:
    """Return the library's results of each text alone, by the name of the prompt; None where it fails."""
    kind = KINDS[json.loads((directory / ENCODER_FILE).read_text())["model_type"]]
    try:
        model = kind(str(directory), device="cpu", local_files_only=True)
    except Exception as error:
        raise LibraryFails from error
    if kind is CrossEncoder:
        names = [None, *(name for name, text in model.prompts.items() if text)]
        ways = {name: partial(model.predict, prompt_name=name) for name in names}
    else:
        ways = {"query": model.encode_query, "document": model.encode_document}
        ways |= {name: partial(model.encode, prompt_name=name) for name in model.prompts.keys() - ways.keys()}
        ways |= {} if kind is MultiVectorEncoder else {None: model.encode}
    if kind is SparseEncoder:
        ways = {name: partial(way, convert_to_sparse_tensor=False) for name, way in ways.items()}
    return {
        name: [ask(way, text) for text in (PAIRS if kind is CrossEncoder else TEXTS)]
        for name, way in ways.items()
    }


def ask(way: Callable[..., Any], text: Any) -> NDArray[np.float32] | None:
    try:
        [told] = way([text], batch_size=1, show_progress_bar=False)
    except Exception:
        return None
    return np.atleast_1d(torch.as_tensor(told).float().numpy())


def ask_us(directory: Path, cache_dir: Path, names: Sequence[str | None]) -> Answers:
    """Return our results of all texts in a batch, by the name of the prompt; None where a text is refused."""
    card = read_card(directory)
    backend, precision = ("torch", "fp32") if card.static is None else ("auto", "auto")
    encoder = load_encoder(EncoderOrder(card, without_bf16(DEVICE), backend, precision, 1, cache_dir))
    task_name = find_own_task(card)
    task = make_tasks(card, num_free_cores=LIBRARY_CORES)[task_name]  # which tries no samples
    pairs = [join_pair(first.encode(), second.encode()) for first, second in PAIRS]
    texts = pairs if task_name == JUDGE else [text.encode() for text in TEXTS]
    found: Answers = {}
    for name in names:
        if name is not None and name not in card.prompts:
            assert name in ("query", "document"), f"there is no prompt {name}"
            continue
        spec = make_spec(card, EncodingOptions(prompt=name))
        rounds = task.process(spec, texts, 10_000)
        read, constants = ask_task(rounds)
        assert {each.code for each in read.failures.values()} <= {TOO_MANY_TOKENS}
        places = np.array([place for place in range(len(texts)) if place not in read.failures])
        inputs = {key: values.take(places) for key, values in read.inputs.items()}
        for constant, value in constants.items():
            inputs[constant] = Ragged.from_scalars(np.full(len(places), value, np.int32))
        encoded = encoder.encode(Batch(inputs))
        finished = finish(
            rounds, encoded.take(np.searchsorted(places, np.arange(len(texts))).clip(max=len(places) - 1))
        )
        assert finished.failures.keys() == read.failures.keys(), finished.failures
        rows = [finished.results.row(row) for row in range(len(texts))]
        if task_name == EMBED and spec.outputs != DENSE:
            rows = [unspread(row, card) for row in rows]
        found[name] = [None if place in read.failures else row for place, row in enumerate(rows)]
    return found


def read_card(directory: Path) -> ModelCard:
    """Return the card. Raise ModelError if the model is refused, unless it is in use."""
    card = read_model_card("small", directory)
    if card.flaws:
        raise ModelError(" ".join(card.flaws))
    return card


def unspread(row: Any, card: Any) -> NDArray[np.float32]:
    """Return a weight for each word of the vocabulary, or the vectors of tokens."""
    told = unpack(row.tobytes())
    if not card.sparse_dimensions:
        return told.vectors.astype(np.float32)
    whole = np.zeros(card.sparse_dimensions, np.float32)
    whole[told.indices] = told.weights
    return whole


def describe_difference(found: Answers, expected: Answers, least: float) -> str:
    """Return how the results differ; empty if they do not."""
    for name, told in expected.items():
        for place, theirs in enumerate(told):
            ours = found[name][place] if name in found else theirs
            if theirs is None or ours is None:
                continue
            where = f"with the prompt {name}, text {place}"
            if ours.shape != theirs.shape:
                return f"{where}: {ours.shape} instead of {theirs.shape}"
            size = np.abs(theirs).max(initial=1e-6)
            change = float(np.abs(ours - theirs).max(initial=0) / size)
            norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
            cosine = float(((ours * theirs).sum(axis=-1)[norms > 0] / norms[norms > 0]).min(initial=1))
            if not cosine >= least or not change <= 20 * (1 - least):
                return f"{where}: a cosine of {cosine:.5f}, and numbers that differ by {change:.2g}"
    return ""


def list_keys(value: Any) -> set[str]:
    """Return the keys of a stored value, and of those in it."""
    told = value if isinstance(value, Mapping) else {}
    return {str(key) for key in told}.union(*(list_keys(each) for each in told.values()))


def check(
    directory: Path, cache_dir: Path, files: Collection[str], keys: Collection[str], least: float = 0.9999
) -> Answers | None:
    """Compare both sides, and return the library's results; None if it cannot use the model."""
    try:
        expected = ask_library(directory)
    except LibraryFails:
        expected = {}
    can_use = any(each is not None for told in expected.values() for each in told)
    try:
        found = ask_us(directory, cache_dir, [*expected] or [None])
    except (ModelError, InvalidOption) as error:
        told = str(error)
        assert any(each in told for each in files), f"no file of {files} is named: {told}"
        assert any(each in told for each in keys), f"no key of {keys} is named: {told}"
    except (RuntimeError, ValueError):
        assert not can_use
    else:
        assert can_use, "the library cannot use the model, and we do"
        assert not (difference := describe_difference(found, expected, least)), difference
    return expected if can_use else None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    Small.home = tmp_path_factory.mktemp("small")
    return Small.home


@pytest.fixture(scope="module")
def plain(home: Path) -> Callable[[Build, Mapping[str, Any]], Answers | None]:
    """Return the function that answers what the library computes without a value that is stored."""
    known: dict[str, Answers | None] = {}

    def find(build: Build, beside: Mapping[str, Any]) -> Answers | None:
        key = f"{build}{beside}"
        if key not in known:
            directory = home / f"plain-{len(known)}"
            try:
                build(directory, **beside)
                known[key] = ask_library(directory)
            except Exception:  # without the value there may be no model
                known[key] = None
        return known[key]

    return find


# The settings of a transformer that other kinds of models read too, with a value each.
IN_ALL_KINDS: Final[Mapping[str, Sequence[Case]]] = {
    "transformer_task": [Case("no-such-task", written=True)],
    "processor_kwargs": [Case({"truncation_side": "left"}), Case({"model_max_length": 12}, written=True)],
    "config_kwargs": [Case({"num_hidden_layers": 1}, written=True)],
    "processing_kwargs": [
        Case({"text": SHORT}),
        Case({"text": {"add_special_tokens": False}}),
        Case({"text": {"padding": "max_length", "max_length": 30}}),
    ],
    "module_output_name": [Case("all_embeddings", written=True)],
    "query_length": [Case(12)],
    "document_length": [Case(12)],
    "max_seq_length": [Case(12), Case(12, written=True)],
    "do_lower_case": [Case(True), Case(True, written=True)],
}
OTHER_TRANSFORMERS: Final = {
    "Transformer of a SparseEncoder": Arguments(write_splade_transformer, TRANSFORMER_FILE, IN_ALL_KINDS),
    "Transformer of a MultiVectorEncoder": Arguments(
        write_colbert_transformer,
        TRANSFORMER_FILE,
        {**IN_ALL_KINDS, "query_expansion": TRANSFORMER_CASES["query_expansion"]},
    ),
    "Transformer of a CrossEncoder": Arguments(
        write_classifying_transformer,
        TRANSFORMER_FILE,
        {
            **IN_ALL_KINDS,
            "query_length": [Case(12, no_effect="it reads pairs")],
            "document_length": [Case(12, no_effect="it reads pairs")],
        },
    ),
    "Dense of a CrossEncoder": Arguments(
        write_scoring_dense,
        "2_Dense",
        {"module_output_name": [Case("scores", no_effect="as all such models")]},
    ),
}
TABLE: Final = {each.__name__: told for each, told in CLASSES.items()} | OTHER_TRANSFORMERS
CASES: Final = [
    pytest.param(told, argument, case, id=f"{name}-{argument}-{case.name}{'-written' * case.written}")
    for name, told in TABLE.items()
    for argument, cases in told.cases.items()
    if not isinstance(cases, str)
    for case in cases
]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("told", "argument", "case"), CASES)
def test_what_is_stored_is_computed_or_refused(
    told: Arguments,
    argument: str,
    case: Case,
    plain: Callable[[Build, Mapping[str, Any]], Answers | None],
    tmp_path: Path,
    cache_dir: Path,
) -> None:
    directory = tmp_path / "model"
    if case.written:
        told.build(directory, **case.beside)
        change(find_file(directory, told.file), {argument: case.value})
    else:
        told.build(directory, **case.beside, **{argument: case.value})
    files = {told.file, "modules.json", *([TOKENIZER_FILE] if argument == "processor_kwargs" else [])}
    # A module that is not supported where it is, is told by its class instead.
    keys = {argument, *list_keys(case.value), *(f"{name} in modules.json" for name in (*TABLE, "Pooling"))}
    expected = check(directory, cache_dir, files, keys, case.least)
    without = plain(told.build, case.beside)
    if expected is not None and without is not None and expected.keys() == without.keys():
        has_effect = bool(describe_difference(expected, without, 0.99999))
        assert case.no_effect == MAY_BE or has_effect != bool(case.no_effect), (
            f"it has an effect: {has_effect}"
        )


@pytest.mark.parametrize(
    "written",
    [pytest.param(each, id=f"{each.file}-{each.changes!r:.70}") for each in WRITTEN],
)
def test_what_older_releases_and_others_store_is_computed_or_refused(
    written: Written, plain: Any, tmp_path: Path, cache_dir: Path
) -> None:
    directory = tmp_path / "model"
    written.build(directory)
    change(find_file(directory, written.file), written.changes)
    check(directory, cache_dir, {written.file}, {*written.changes, *list_keys(written.changes)})


def list_activations() -> dict[str, Any]:
    """Return torch's activations by their paths; None for one that is not made without arguments."""
    found: dict[str, Any] = {"torch.nn.modules.linear.Identity": nn.Identity()}
    for name in nn.modules.activation.__all__:
        kind = getattr(nn.modules.activation, name)
        try:
            found[f"{kind.__module__}.{name}"] = kind().eval()
        except TypeError:
            found[f"{kind.__module__}.{name}"] = None
    return found


VALUES: Final = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("num_labels", [1, 3])
def test_every_activation_of_a_score_is_computed_or_refused(home: Path, num_labels: int) -> None:
    directory = home / f"scores-{num_labels}"
    write_classifier(directory, num_labels=num_labels)
    for path, activation in list_activations().items():
        change(directory / ENCODER_FILE, {"activation_fn": path})
        logits = VALUES[:, :num_labels]
        try:
            expected = activation(logits).detach().numpy()
        except (RuntimeError, TypeError, ValueError):
            expected = None
        try:
            spec = make_spec(read_card(directory), EncodingOptions())
            found = activate(logits.numpy(), spec.activation)
        except ModelError as error:
            assert ENCODER_FILE in str(error)  # noqa: PT017 - either is right
            assert "activation_fn" in str(error)  # noqa: PT017
        else:
            assert expected is not None, path
            assert np.abs(found - expected).max() < 1e-5, path


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_every_activation_of_a_dense_module_is_computed_or_refused(home: Path) -> None:
    directory = home / "activations"
    write_dense(directory)
    given = VALUES.repeat(1, 2)[:, :HIDDEN_SIZE]
    for path, activation in list_activations().items():
        folder = directory / "2_Dense"
        change(folder / "config.json", {"activation_function": path})
        has_weights = activation is not None and any(True for _ in activation.parameters())
        try:
            expected = None if has_weights else Dense.load(str(folder))({"sentence_embedding": given})
        except (RuntimeError, TypeError, ValueError):
            expected = None
        try:
            [layer] = read_card(directory).dense
            found = OurDense(directory, layer)(given)
        except (ModelError, RuntimeError, ValueError) as error:
            assert isinstance(error, ModelError) or expected is None, path  # noqa: PT017 - either is right
        else:
            assert expected is not None, path
            assert (found - expected["sentence_embedding"]).abs().max() < 1e-5, path


def find_file(directory: Path, name: str) -> Path:
    """Return the JSON file of this name, or that in the folder whose name contains this."""
    whole = directory / name
    return whole if whole.is_file() else next(directory.glob(f"*{name}*/config.json"))


# The library's modules that make other models than those which are encoded here. Whatever they store, they are refused.
REFUSED: Final = (
    "BoW", "CLIPModel", "CNN", "LSTM", "LambdaTokenPooling", "WeightedLayerPooling", "WordEmbeddings", "WordWeights",
)  # fmt: skip
ABSTRACT: Final = ("BaseTokenPooling", "InputModule")


def list_classes(base: type = Module) -> Iterator[type]:
    """Yield the library's modules."""
    each: type
    for each in base.__subclasses__():
        if each.__module__.startswith("sentence_transformers."):
            yield each
        yield from list_classes(each)


def list_arguments(kind: type) -> set[str]:
    """Return the arguments of a class, and the keys that it stores."""
    signature = inspect.signature(kind)
    own = () if kind is MLMTransformer else getattr(kind, "config_keys", ())
    return {*signature.parameters, *own}


def test_every_class_and_argument_of_the_library_is_decided() -> None:
    """If a release brings a new one: read what it does, and give it a row."""
    known = {*(each.__name__ for each in CLASSES), *REFUSED, *ABSTRACT}
    assert {each.__name__ for each in list_classes()} | {each.__name__ for each in KINDS.values()} == known
    for kind, told in CLASSES.items():
        assert list_arguments(kind) - told.cases.keys() == set(), f"decide what they mean for {kind.__name__}"
        assert told.cases.keys() - list_arguments(kind) == set(), f"no arguments of {kind.__name__} any more"


def list_values(kind: type, argument: str) -> set[Any]:
    return {case.value for case in CLASSES[kind].cases[argument] if isinstance(case, Case)}


def test_every_value_of_the_librarys_sets_is_tried() -> None:
    """But for the defaults."""
    tasks = list_values(Transformer, "transformer_task")
    assert TRANSFORMER_TASK_TO_AUTO_MODEL.keys() - tasks == {"feature-extraction"}
    similar = list_values(SentenceTransformer, "similarity_fn_name")
    assert {*SentenceTransformer.SUPPORTED_SIMILARITY_FN_NAMES} - similar == {"cosine"}
    assert {*Pooling.POOLING_MODES} - list_values(Pooling, "pooling_mode") == {"mean"}
    assert {*SpladePooling.SPLADE_POOLING_MODES} - list_values(SpladePooling, "pooling_strategy") == {"max"}
    assert {*SpladePooling.SPLADE_ACTIVATION} - list_values(SpladePooling, "activation_function") == {"relu"}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_of_other_models_are_refused_by_name(name: str, home: Path, tmp_path: Path) -> None:
    write_embedder(tmp_path / "model")
    path = tmp_path / "model" / "modules.json"
    kind = next(each for each in list_classes() if each.__name__ == name)
    entry = {"idx": 1, "name": "1", "path": f"1_{name}", "type": f"{kind.__module__}.{name}"}
    for place in (0, 1):
        modules = json.loads(path.read_text())
        modules[place] = entry | {"idx": place}
        (tmp_path / "other").mkdir(exist_ok=True)
        shutil.copytree(tmp_path / "model", tmp_path / "other", dirs_exist_ok=True)
        (tmp_path / "other" / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ModelError, match=name) as refused:
            read_card(tmp_path / "other")
        assert "modules.json" in str(refused.value)
