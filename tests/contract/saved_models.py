"""Small models as sentence-transformers saves them, each with some arguments of one of its modules."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from torch import nn

from tests.contract.small_models import HIDDEN_SIZE, make_tokenizer, write_transformer
from tests.rerankers import write_cross_encoder

PROMPTS: Final = {"query": "find this: ", "document": "A text: "}
Build = Callable[..., None]


class Small:
    """The transformers that models are made of, each written once."""

    home: Path

    @classmethod
    def transformer(cls, kind: str = "BertModel", **sizes: Any) -> str:
        directory = cls.home / "-".join([kind, *map(str, sizes.values())])
        return str(directory if directory.exists() else write_transformer(directory, kind, **sizes))


def at(directory: Path) -> dict[str, Any]:
    return {"path": str(directory), "create_model_card": False}


def make_embedder(*modules: Any, **arguments: Any) -> Any:
    return SentenceTransformer(modules=list(modules), device="cpu", **arguments)


def write_embedder(directory: Path, **arguments: Any) -> None:
    options = {"prompts": PROMPTS} | arguments
    make_embedder(Transformer(Small.transformer()), Pooling(HIDDEN_SIZE), **options).save(**at(directory))


def write_transformer_module(directory: Path, **arguments: Any) -> None:
    source = arguments.pop("model_name_or_path", Small.transformer)()
    first = Transformer(source, **arguments)
    width = len(first.tokenizer) if first.transformer_task == "fill-mask" else HIDDEN_SIZE
    pooling = [] if first.module_output_name == "sentence_embedding" else [Pooling(width)]
    make_embedder(first, *pooling, prompts=PROMPTS).save(**at(directory))


def write_pooling(directory: Path, **arguments: Any) -> None:
    pooling = Pooling(**{"embedding_dimension": HIDDEN_SIZE} | arguments)
    make_embedder(Transformer(Small.transformer()), pooling, prompts=PROMPTS).save(**at(directory))


def write_dense(directory: Path, *, place: int = 2, **arguments: Any) -> None:
    torch.manual_seed(1)
    dense = Dense(**{"in_features": HIDDEN_SIZE, "out_features": 24} | arguments)
    modules = [Transformer(Small.transformer()), Pooling(HIDDEN_SIZE if place == 2 else dense.out_features)]
    modules.insert(place, dense)
    make_embedder(*modules).save(**at(directory))


def write_scoring_dense(directory: Path, **arguments: Any) -> None:
    """A CrossEncoder whose scores a Dense module makes of the pooled vector."""
    torch.manual_seed(1)
    options = {"module_output_name": "scores"} | arguments
    dense = Dense(HIDDEN_SIZE, 1, activation_function=nn.Identity(), **options)
    modules = [Transformer(Small.transformer()), Pooling(HIDDEN_SIZE), dense]
    CrossEncoder(modules=modules, device="cpu").save(**at(directory))


def write_normalize(directory: Path, *, place: int = 2, dense: bool = False, **arguments: Any) -> None:
    torch.manual_seed(1)
    modules = [Transformer(Small.transformer()), Pooling(HIDDEN_SIZE)]
    modules += [Dense(HIDDEN_SIZE, 24)] if dense else []
    modules.insert(place, Normalize(**arguments))
    make_embedder(*modules).save(**at(directory))


def write_behind_pooling(make: Callable[..., Any], directory: Path, **arguments: Any) -> None:
    modules = [Transformer(Small.transformer()), Pooling(HIDDEN_SIZE), make(**arguments)]
    make_embedder(*modules).save(**at(directory))


def write_static(directory: Path, *, behind: Sequence[Any] = (), **arguments: Any) -> None:
    torch.manual_seed(1)
    tokenizer = arguments.pop("tokenizer", lambda: make_tokenizer()._tokenizer)()
    static = StaticEmbedding(tokenizer, **{"embedding_dim": 16} | arguments)
    make_embedder(static, *behind, prompts=PROMPTS).save(**at(directory))


def write_router(directory: Path, **arguments: Any) -> None:
    torch.manual_seed(1)
    dense = {side: [Pooling(HIDDEN_SIZE), Dense(HIDDEN_SIZE, 24)] for side in ("query", "document")}
    routes = {side: [Transformer(Small.transformer()), *rest] for side, rest in dense.items()}
    make_embedder(Router(**{"sub_modules": routes} | arguments)).save(**at(directory))


def make_splade(first: Any, pooling: Any, **arguments: Any) -> Any:
    model = SparseEncoder(modules=[first, pooling], device="cpu", **{"prompts": PROMPTS} | arguments)
    model.encode(["known by now is the size"])
    return model


def make_masked_transformer(**arguments: Any) -> Any:
    return Transformer(Small.transformer("BertForMaskedLM"), transformer_task="fill-mask", **arguments)


def write_splade(directory: Path, **arguments: Any) -> None:
    make_splade(make_masked_transformer(), SpladePooling(), **arguments).save(**at(directory))


def write_splade_pooling(directory: Path, **arguments: Any) -> None:
    make_splade(make_masked_transformer(), SpladePooling(**arguments)).save(**at(directory))


def write_splade_transformer(directory: Path, **arguments: Any) -> None:
    make_splade(make_masked_transformer(**arguments), SpladePooling()).save(**at(directory))


def write_old_splade(directory: Path, **arguments: Any) -> None:
    first = MLMTransformer(Small.transformer("BertForMaskedLM"), **arguments)
    make_splade(first, SpladePooling()).save(**at(directory))


def write_sparse_static(directory: Path, **arguments: Any) -> None:
    tokenizer = arguments.pop("tokenizer", make_tokenizer)()
    weights = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(1))
    module = SparseStaticEmbedding(tokenizer, **{"weight": weights} | arguments)
    SparseEncoder(modules=[module], device="cpu").save(**at(directory))


def write_auto_encoder(directory: Path, **arguments: Any) -> None:
    torch.manual_seed(1)
    module = SparseAutoEncoder(**{"input_dim": HIDDEN_SIZE, "hidden_dim": 64} | arguments)
    modules = [Transformer(Small.transformer()), Pooling(HIDDEN_SIZE), module]
    SparseEncoder(modules=modules, device="cpu").save(**at(directory))


def make_colbert(
    transformer: Mapping[str, Any], *more: Any, mask: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    torch.manual_seed(1)
    names = {"module_input_name": "token_embeddings"}
    dense = Dense(HIDDEN_SIZE, 16, bias=False, activation_function=nn.Identity(), **names)
    modules = [Transformer(Small.transformer(), **transformer), dense]
    modules += [MultiVectorMask(**mask or {}), *more, Normalize(**names)]
    return MultiVectorEncoder(modules=modules, device="cpu", **{"prompts": PROMPTS} | arguments)


def write_colbert(directory: Path, **arguments: Any) -> None:
    make_colbert({}, **arguments).save(**at(directory))


def write_colbert_transformer(directory: Path, **arguments: Any) -> None:
    make_colbert(arguments).save(**at(directory))


def write_mask(directory: Path, **arguments: Any) -> None:
    make_colbert({}, mask=arguments).save(**at(directory))


def write_token_pooling(directory: Path, **arguments: Any) -> None:
    make_colbert({}, HierarchicalTokenPooling(**{"pool_factor": 2.0} | arguments)).save(**at(directory))


def write_classifier(directory: Path, **arguments: Any) -> None:
    source = Small.transformer("BertForSequenceClassification", num_labels=arguments.pop("num_labels", 1))
    CrossEncoder(source, device="cpu", **{"prompts": PROMPTS} | arguments).save(**at(directory))


def write_classifying_transformer(directory: Path, **arguments: Any) -> None:
    source = Small.transformer("BertForSequenceClassification", num_labels=1)
    first = Transformer(source, transformer_task="sequence-classification", **arguments)
    CrossEncoder(modules=[first], device="cpu", prompts=PROMPTS).save(**at(directory))


def write_logit_score(directory: Path, *, true_token_id: int = 301, false_token_id: int | None = 300) -> None:
    saved = write_cross_encoder(directory.with_name("causal"), false=false_token_id)
    change(saved / "1_LogitScore" / "config.json", {"true_token_id": true_token_id})
    saved.rename(directory)


def change(path: Path, changes: Mapping[str, Any]) -> None:
    """Change the values of these keys in a JSON file; of the first module's entry, if it is the list of modules."""
    told = json.loads(path.read_text())
    (told[0] if isinstance(told, list) else told).update(changes)
    path.write_text(json.dumps(told))
