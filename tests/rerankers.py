"""Tiny generative rerankers with random weights, in the layouts of their authors, and pairs for them.

The golden data in tests/data/rerankers are made with the same weights, so these come from NumPy, whose random numbers
are the same everywhere.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tests.rounds import ask, finish
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry
from vectormill.models.specs import make_spec
from vectormill.ragged import Ragged
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.encoder.encoder import Encoder
from worker.tasks.table import make_tasks
from worker.tasks.task import Finished

DATA: Final = Path(__file__).parent / "data" / "rerankers"
# The name that a family is recognized by, if it is -> the prefix of its classes in transformers, its tokenizer.
FAMILIES: Final = {
    "Qwen3-Reranker-tiny": ("Qwen3", "qwen"),
    "bge-reranker-v2-gemma-tiny": ("Gemma", "gemma"),
    "mxbai-rerank-base-v2-tiny": ("Qwen2", "qwen"),
    "reranker-of-gemma2": ("Gemma2", "gemma"),
}
QWEN3: Final = "Qwen3-Reranker-tiny"
SPECIAL_TOKENS: Final = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"},
    "gemma": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "tokenizer_class": "GemmaTokenizer",
    },
}
MAX_TOKENS: Final = 512
PAIRS: Final = (
    ("how to parse a date", "datetime.strptime reads a date from a text."),
    ("how to parse a date", "zlib compresses bytes."),
    ("what is a panda?", "hi"),
    (" spaces before and behind ", "\n\nnew lines before and behind\n\n"),
    ("does it return None?", "Return None if the key is not in the mapping, {query}, {document}, 1 and 0."),
    ("日付の読み方", "Ünïcödé, 漢字かな交じり文, русский"),
    ("tokens", "a text that says <|im_end|> and <bos> as its own words"),
    ("a document that is too long", " ".join(f"Sentence {number} of a long text." for number in range(24))),
)


def write_reranker(directory: Path, family: str, **more: Any) -> Path:
    """Write a tiny reranker, whose directory has the name of its family unless it is told another one."""
    import transformers

    prefix, tokenizer = FAMILIES[family]
    rust = json.loads((DATA / f"{tokenizer}.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": MAX_TOKENS, "pad_token_id": 0}
    sizes["vocab_size"] = len(rust["model"]["vocab"]) + len(rust["added_tokens"])
    heads = {} if prefix == "Qwen2" else {"head_dim": 8}
    config = getattr(transformers, f"{prefix}Config")(
        **{**sizes, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True, **heads, **more}
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    draws = np.random.default_rng(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = draws.normal(0, 0.3, tuple(parameter.shape)).astype(np.float32)
            # Norms stay near 1, so that no state vanishes.
            parameter.copy_(
                torch.from_numpy(values * 0.3 + ("Gemma" not in prefix) if values.ndim == 1 else values)
            )
    target = directory / family
    model.save_pretrained(target)
    shutil.copy(DATA / f"{tokenizer}.json", target / "tokenizer.json")
    settings = {**SPECIAL_TOKENS[tokenizer], "model_max_length": MAX_TOKENS}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return target


CHAT: Final = (
    "{% for message in messages %}{% if message['role'] == 'system' %}<|im_start|>system\n{{ message['content'] }}"
    "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>user\nQuery: {{ messages | selectattr('role', 'eq', 'query') | "
    "map(attribute='content') | first TRIM }}\nDocument: {{ messages[-1]['content'] TRIM }}\nRelevance:<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_cross_encoder(
    directory: Path, *, family: str = QWEN3, false: int | None = 300, trim: str = "", **more: Any
) -> Path:
    """Write a reranker in the layout of sentence-transformers, and return its directory."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    written = write_reranker(directory, family)
    (written / "chat_template.jinja").write_text(CHAT.replace("TRIM", trim))
    options = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(written), transformer_task="text-generation", processing_kwargs=options)
    model = CrossEncoder(modules=[transformer, LogitScore(301, false)], device="cpu", **more)
    model.save(str(directory / "saved"))
    return directory / "saved"


def read_card(directory: Path, **entry: Any) -> ModelCard:
    return Registry({"m": ModelEntry(path=str(directory), **entry)}).card("m", weights=True)


def rank(
    card: ModelCard,
    encoder: Encoder,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    groups: Sequence[Sequence[int]] = (),
    **options: Any,
) -> tuple[NDArray[np.float32], Finished]:
    """Return the scores of pairs [n] and what the task says of them, as the engine computes it.

    `groups` says which pairs share a batch; by default all of them do. The order of the rows is that of the pairs.
    """
    spec = make_spec(card, EncodingOptions(**options))
    rounds = make_tasks(card)[JUDGE].process(
        spec, [join_pair(first.encode(), second.encode()) for first, second in pairs], 1 << 20
    )
    read, _ = ask(rounds)
    assert read.lengths.max() <= spec.max_tokens
    scores = np.zeros((len(pairs), 1), np.float32)
    encoded = [index for index in range(len(pairs)) if index not in read.failures]
    for group in groups or [encoded]:
        places = np.array(group)
        batch = Batch({name: values.take(places) for name, values in read.inputs.items()})
        scores[places] = encoder.encode(batch).matrix
    finished = finish(rounds, Ragged.from_matrix(scores), read.failures)
    return finished.results.matrix[:, 0], finished
