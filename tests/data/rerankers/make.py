"""Write the golden data of this folder with the authors' own packages.

Run `PYTHONPATH=. python tests/data/rerankers/make.py` in an environment with FlagEmbedding 1.4.2, mxbai-rerank 0.1.6
and transformers 4.57; the tests need none of them.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests.contract.strange_texts import real_texts
from tests.rerankers import DATA, PAIRS, write_reranker

# The words of templates and answers, so that each answer is one token, as in the real vocabularies.
WORDS = ["yes no Yes No 1 0 query: document: Query Document Instruct: relevance"] * 300
NUM_TOKENS = 1000


def make_tokenizers() -> None:
    texts = [*real_texts()[:600], *WORDS, *["yes", "no", "Yes"] * 300]
    qwen = Tokenizer(models.BPE())
    qwen.normalizer = normalizers.NFC()
    qwen.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    qwen.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet))
    qwen.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    qwen.add_tokens(["<think>", "</think>"])
    qwen.save(str(DATA / "qwen.json"), pretty=False)
    gemma = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    lines = ["Yes"] * 300 + [
        " " + part for text in texts for part in text.split(" ")
    ]  # no token goes over a space
    gemma.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=[*special, *bytes_])
    )
    description = json.loads(gemma.to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in special
    ]
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<bos>", "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    (DATA / "gemma.json").write_text(json.dumps(description, ensure_ascii=False), encoding="utf-8")


def record(model: Any, score: Callable[[], list[float]]) -> tuple[list[int], float]:
    """Return the ids, without padding, that the model reads while `score` scores one pair, and the score."""
    seen: list[Any] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs), with_kwargs=True
    )
    [number] = score()
    handle.remove()
    is_token = seen[-1]["attention_mask"][0].bool()
    return seen[-1]["input_ids"][0][is_token].tolist(), number


def make_cases(
    model: Any, score: Callable[..., list[float]], prompts: Sequence[str | None]
) -> list[dict[str, Any]]:
    cases = []
    for prompt in prompts:
        for pair in PAIRS:
            ids, number = record(model, partial(score, pair, prompt))
            cases.append({"pair": pair, "prompt": prompt, "ids": ids, "score": number})
    return cases


def make_gemma(directory: Path) -> list[dict[str, Any]]:
    from FlagEmbedding.inference.reranker.decoder_only.base import BaseLLMReranker

    path = write_reranker(directory, "bge-reranker-v2-gemma-tiny")
    reranker = BaseLLMReranker(str(path), devices=["cpu"], max_length=100)

    def score(pair: tuple[str, str], prompt: str | None) -> list[float]:
        return list(reranker.compute_score([pair], prompt=prompt))

    return make_cases(reranker.model, score, (None, "Is B about A?"))


def make_mxbai(directory: Path) -> list[dict[str, Any]]:
    from mxbai_rerank import MxbaiRerankV2

    path = write_reranker(directory, "mxbai-rerank-base-v2-tiny")
    reranker = MxbaiRerankV2(str(path), device="cpu", torch_dtype=torch.float32, max_length=100)

    def score(pair: tuple[str, str], prompt: str | None) -> list[float]:
        return list(reranker.predict([pair[0]], [pair[1]], instruction=prompt).tolist())

    return make_cases(reranker.model, score, (None, "Prefer manuals."))


def main() -> None:
    make_tokenizers()
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "bge-reranker-v2-gemma-tiny": make_gemma(Path(folder)),
            "mxbai-rerank-base-v2-tiny": make_mxbai(Path(folder)),
        }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"FlagEmbedding": "1.4.2", "mxbai-rerank": "0.1.6"}
    (DATA / "cases.json").write_text(
        json.dumps({"versions": versions, "cases": cases}, ensure_ascii=False, separators=(",", ":")),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
