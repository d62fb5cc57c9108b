"""Generative rerankers: how a pair is put into words, and which words' logits are its score. Imports no torch.

Such a model is a …ForCausalLM. Its input is a text made of an instruction, a query and a document, and its
score is the logit of one word at the last token, or the difference of two. sentence-transformers stores both
beside the model (a module LogitScore and a chat template); for models published without them, RERANKERS says
what their authors' code does. Chat templates are read in chat_templates.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

INSTRUCTION: Final = "instruction"
QUERY: Final = "query"
DOCUMENT: Final = "document"
FIELDS: Final = {field: f"{{{field}}}" for field in (INSTRUCTION, QUERY, DOCUMENT)}
FIELD: Final = re.compile(rf"\{{({INSTRUCTION}|{QUERY}|{DOCUMENT})\}}")


@dataclass(frozen=True, slots=True)
class Template:
    """The text of a pair in pieces that are tokenized one by one, and the words that score it.

    A piece has the fields `{instruction}`, `{query}` and `{document}`. If a pair has too many tokens, only
    the document is cut. `plain` is used if the instruction is empty; `instruction` is the default one. White
    space around the fields in `strips` is removed. `true` and `false` are words or token
    ids: the score is the logit of `true`, minus that of `false` if there is one. Without `true` the model has
    a head of its own.
    """

    pieces: tuple[str, ...]
    plain: tuple[str, ...]
    true: str | int | None = None
    false: str | int | None = None
    instruction: str = ""
    strips: frozenset[str] = frozenset()

    @property
    def takes_instructions(self) -> bool:
        return any(FIELDS[INSTRUCTION] in piece for piece in self.pieces)

    @property
    def words(self) -> tuple[str | int, ...]:
        """Return the words whose logits are read, the true one first."""
        return tuple(word for word in (self.true, self.false) if word is not None)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A family of generative rerankers, with the page or code that defines its template.

    It is recognized by its architecture and by one of `names` in the name or directory of a model.
    """

    name: str
    model_type: str
    names: tuple[str, ...]
    template: Template
    source: str


_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
_GEMMA: Final = ("<bos>", "A: {query}", "\n", "B: {document}", "\n", "{instruction}")
_MXBAI: Final = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n",
    "query: {query}",
    "\n",
    "document: {document}",
    "\n",
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    "<|im_end|>\n<|im_start|>assistant\n",
)
RERANKERS: Final = (
    Reranker(
        "qwen3-reranker",
        "qwen3",
        ("Qwen3-Reranker",),
        Template(
            _QWEN3,
            _QWEN3,
            "yes",
            "no",
            "Given a web search query, retrieve relevant passages that answer the query",
        ),
        "https://huggingface.co/Qwen/Qwen3-Reranker-0.6B",
    ),
    Reranker(
        "bge-reranker-gemma",
        "gemma",
        ("bge-reranker-v2-gemma",),
        Template(
            _GEMMA,
            _GEMMA,
            "Yes",
            None,
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        "FlagEmbedding 1.4.2, inference/reranker/decoder_only/base.py",
    ),
    Reranker(
        "mxbai-rerank-v2",
        "qwen2",
        ("mxbai-rerank-base-v2", "mxbai-rerank-large-v2"),
        Template((_MXBAI[0], "instruction: {instruction}\nquery: {query}", *_MXBAI[2:]), _MXBAI, "1", "0"),
        "mxbai-rerank 0.1.6, mxbai_rerank_v2.py",
    ),
)


def fill_in(piece: str, values: Mapping[str, str]) -> str:
    """Return the piece with the fields replaced by their values, in which no field is looked for."""
    return FIELD.sub(lambda field: values[field[1]], piece)


def strip_texts(values: Mapping[str, str], fields: Collection[str]) -> dict[str, str]:
    """Return the values without white space around those of the given fields."""
    return {field: text.strip() if field in fields else text for field, text in values.items()}
