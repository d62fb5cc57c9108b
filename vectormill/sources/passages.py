"""Passages: documents become rows, one a passage, whichever kind of source they are from.

A passage is named by its document and its number (`key#0`, `key#1`, …), a document that is one passage too, so that it
keeps its name when it grows. Its metadata are the document's, with where it stands: `_passage`, in code points.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.jobs.item import PASSAGE, Item
from vectormill.sources.reader import ENCODER, MOST_BYTES, MOST_ROWS, Reader, SourcePlace
from vectormill.sources.source import TOKENS, Split

MARKDOWN_SUFFIXES: Final = (".md", ".markdown")
# Special tokens around a text, where a tokenizer does not say how many: [CLS] and [SEP].
USUAL_SPECIAL_TOKENS: Final = 2

# A document's passages as (where it begins, its text), for each of some documents.
Cut = Callable[[list[str]], list[list[tuple[int, str]]]]


class PassageReader(Reader):
    """Read documents from another reader and yield their passages, cut in all of a batch at a time."""

    def __init__(self, documents: Reader, split: Split, place: SourcePlace) -> None:
        self._documents = documents
        self._split = split
        self._place = place
        self.complaints = documents.complaints

    def read(self) -> Iterator[list[Item]]:
        plain, markdown = make_cuts(self._split, self._place)
        for documents in self._documents.read():
            passages: list[Item] = []
            num_bytes = 0
            for document, cuts in zip(documents, self._cut_all(documents, plain, markdown), strict=True):
                for passage in name_passages(document, cuts):
                    passages.append(passage)
                    num_bytes += len(passage.text)
                    if len(passages) >= MOST_ROWS or num_bytes >= MOST_BYTES:
                        yield passages
                        passages, num_bytes = [], 0
            if passages:
                yield passages

    def cancel(self) -> None:
        self._documents.cancel()

    def _cut_all(self, documents: list[Item], plain: Cut, markdown: Cut) -> list[list[tuple[int, str]]]:
        """Split documents into passages, in order. A document that is not text stays whole and fails alone."""
        cuts: list[list[tuple[int, str]]] = [[] for _ in documents]
        texts = [decode(document.text) for document in documents]
        for cut, is_wanted in ((plain, False), (markdown, True)):
            chosen = [
                number
                for number, document in enumerate(documents)
                if texts[number] is not None and self._is_markdown(document.key) is is_wanted
            ]
            for number, passages in zip(chosen, cut([texts[number] or "" for number in chosen]), strict=True):
                cuts[number] = passages
        return cuts

    def _is_markdown(self, key: str) -> bool:
        if self._split.markdown is not None:
            return self._split.markdown
        return key.lower().endswith(MARKDOWN_SUFFIXES)


def decode(text: bytes) -> str | None:
    """Return the text; None for what is no Unicode or too long to be a document, which no passage can be cut from."""
    try:
        return text.decode() if len(text) < MOST_BYTES else None
    except UnicodeDecodeError:
        return None


def name_passages(document: Item, cuts: list[tuple[int, str]]) -> Iterator[Item]:
    """Yield the rows of one document; it is one row itself where nothing was cut, as it has no text."""
    metadata: dict[str, Any] = msgspec.json.decode(document.metadata) if document.metadata else {}
    if not cuts:
        yield name_passage(document, metadata, 0, 0, document.text.decode("utf-8", "replace"), document.text)
    for index, (start, passage) in enumerate(cuts):
        yield name_passage(document, metadata, index, start, passage, passage.encode())


def name_passage(
    document: Item, metadata: dict[str, Any], index: int, start: int, passage: str, text: bytes
) -> Item:
    metadata[PASSAGE] = {
        "document": document.key,
        "end": start + len(passage),
        "index": index,
        "start": start,
    }
    return Item(f"{document.key}#{index}", text, ENCODER.encode(metadata))


def make_cuts(split: Split, place: SourcePlace) -> tuple[Cut, Cut]:
    """Return the splitters of plain text and of Markdown. Raise InvalidOption and SourceFailed."""
    from semantic_text_splitter import MarkdownSplitter, TextSplitter  # here: the API imports this module too

    if split.by != TOKENS:
        capacity = (split.min_chars, split.max_chars)
        return TextSplitter(capacity).chunk_all_indices, MarkdownSplitter(capacity).chunk_all_indices
    tokenizer = load_tokenizer(split, place)
    plain = TextSplitter.from_huggingface_tokenizer_str(tokenizer, split.tokens, split.overlap)
    markdown = MarkdownSplitter.from_huggingface_tokenizer_str(tokenizer, split.tokens, split.overlap)
    return plain.chunk_all_indices, markdown.chunk_all_indices


def load_tokenizer(split: Split, place: SourcePlace) -> str:
    """Return the model's tokenizer as JSON, which counts all of a text.

    Raise InvalidOption for passages that the model would cut.
    """
    spec = place.find_spec()
    if spec is None:
        raise InvalidOption(
            "Passages of so many tokens need a collection whose model is known; split by paragraphs."
        )
    model = spec.model
    card = place.registry.card(model)
    max_tokens = min(spec.max_tokens, card.max_tokens)
    path = card.path / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceFailed(
            f"The model {model!r} has no tokenizer.json that counts its tokens; split by paragraphs instead."
        ) from error
    room = max_tokens - count_special_tokens(tokenizer)
    if split.tokens > room:
        raise InvalidOption(
            f"Passages of {split.tokens} tokens would be cut: {model!r} reads {max_tokens} at once, its "
            f"special tokens included, which leaves {room}."
        )
    tokenizer["truncation"] = tokenizer["padding"] = None
    return json.dumps(tokenizer)


def count_special_tokens(tokenizer: dict[str, Any]) -> int:
    """Count the special tokens that the tokenizer's post-processor adds."""
    processor = tokenizer.get("post_processor") or {}
    if processor.get("type") != "TemplateProcessing":
        return USUAL_SPECIAL_TOKENS
    return sum("SpecialToken" in part for part in processor.get("single", ()))
