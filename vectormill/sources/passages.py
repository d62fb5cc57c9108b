"""Passages: a split document of any source becomes one collection row per passage.

A row's key is the document's key and the passage's number (`key#0`, `key#1`, …). A document that is a single
passage is numbered too, so that its key stays the same when the document grows. A row's metadata are those of
its document plus `_passage`, the passage's position in code points. With late chunking a row is a pair of the
passage and its document, or of a long document the part around the passage.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from vectormill.domain.encoding import LATE
from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.jobs.chunk import USUAL_SPECIAL_TOKENS
from vectormill.jobs.item import PASSAGE, PLACE_MARK, Item, join_pair
from vectormill.rows.values import encode_metadata
from vectormill.sources.parsing import TOKENS, Split
from vectormill.sources.reader import MOST_BYTES, MOST_ROWS, Reader, SourcePlace

# The usual number of characters of a token, by which the window of a model is compared with documents.
CHARS_PER_TOKEN: Final = 4
MARKDOWN_SUFFIXES: Final = (".md", ".markdown")

# Cuts documents into passages: for each document a list of (start position, passage text).
Cut = Callable[[list[str]], list[list[tuple[int, str]]]]


class PassageReader(Reader):
    """Read documents from another reader and yield their passages, splitting a whole batch at a time."""

    def __init__(self, documents: Reader, split: Split, place: SourcePlace) -> None:
        self._documents = documents
        self._split = split
        self._place = place
        self.complaints = documents.complaints
        self.must_be_asked = documents.must_be_asked

    def read(self) -> Iterator[Sequence[Item]]:
        plain, markdown = make_cuts(self._split, self._place)
        spec = self._place.find_spec()
        window = CHARS_PER_TOKEN * spec.max_tokens if spec is not None and spec.long_texts == LATE else 0
        for documents in self._documents.read():
            passages: list[Item] = []
            num_bytes = 0
            for document, cuts in zip(documents, self._cut_all(documents, plain, markdown), strict=True):
                for passage in name_passages(document, cuts, window):
                    passages.append(passage)
                    num_bytes += passage.num_bytes
                    if len(passages) >= MOST_ROWS or num_bytes >= MOST_BYTES:
                        yield passages
                        passages, num_bytes = [], 0
            if passages:
                yield passages

    def cancel(self) -> None:
        self._documents.cancel()

    def _cut_all(self, documents: Sequence[Item], plain: Cut, markdown: Cut) -> list[list[tuple[int, str]]]:
        """Split documents into passages, in order. One that is not text is not split and fails alone."""
        cuts: list[list[tuple[int, str]]] = [[] for _ in documents]
        texts = [decode(document.text) for document in documents]
        always = self._split.markdown
        are_markdown = [
            document.key.lower().endswith(MARKDOWN_SUFFIXES) if always is None else always
            for document in documents
        ]
        for cut, is_wanted in ((plain, False), (markdown, True)):
            chosen = [
                number
                for number, is_markdown in enumerate(are_markdown)
                if texts[number] is not None and is_markdown is is_wanted
            ]
            for number, passages in zip(chosen, cut([texts[number] or "" for number in chosen]), strict=True):
                cuts[number] = passages
        return cuts


def decode(text: bytes) -> str | None:
    """Decode a document; return None if it is not valid Unicode or too long to be split."""
    try:
        return text.decode() if len(text) < MOST_BYTES else None
    except UnicodeDecodeError:
        return None


def pair_with_text(whole: str, start: int, passage: str, window: int) -> bytes:
    """Return the pair of a passage and the text that it is read in, with a mark where its characters come before too.

    That is the whole document, or one of its parts of two windows with half a window on each side.
    """
    begin, end = 0, len(whole)
    if end > 3 * window:
        first = start - start % (2 * window)
        begin, end = max(0, first - window // 2), max(first + 5 * window // 2, start + len(passage))
    around, place = whole[begin:end], start - begin
    if around.find(passage) < place:
        around = f"{around[:place]}{PLACE_MARK}{around[place:]}"
    return join_pair(passage.encode(), around.encode())


def name_passages(document: Item, cuts: list[tuple[int, str]], window: int = 0) -> Iterator[Item]:
    """Yield the rows of one document: its passages, or the whole document if it could not be split.

    With a `window`, in characters, passages are read in their texts.
    """
    metadata: dict[str, Any] = msgspec.json.decode(document.metadata) if document.metadata else {}
    if not cuts:
        yield name_passage(document, metadata, 0, 0, document.text.decode("utf-8", "replace"), document.text)
    whole = document.text.decode() if cuts and window else ""
    for index, (start, passage) in enumerate(cuts):
        text = pair_with_text(whole, start, passage, window) if window else passage.encode()
        yield name_passage(document, metadata, index, start, passage, text)


def name_passage(
    document: Item, metadata: dict[str, Any], index: int, start: int, passage: str, text: bytes
) -> Item:
    metadata[PASSAGE] = {
        "document": document.key,
        "end": start + len(passage),
        "index": index,
        "start": start,
    }
    return Item(f"{document.key}#{index}", text, encode_metadata(metadata))


def make_cuts(split: Split, place: SourcePlace) -> tuple[Cut, Cut]:
    """Return the splitters of plain text and of Markdown. Raise InvalidOption or SourceFailed."""
    from semantic_text_splitter import MarkdownSplitter, TextSplitter  # lazily: the API imports this module

    if split.by != TOKENS:
        capacity = (split.min_chars, split.max_chars)
        return TextSplitter(capacity).chunk_all_indices, MarkdownSplitter(capacity).chunk_all_indices
    tokenizer = load_tokenizer(split, place)
    plain = TextSplitter.from_huggingface_tokenizer_str(tokenizer, split.tokens, split.overlap)
    markdown = MarkdownSplitter.from_huggingface_tokenizer_str(tokenizer, split.tokens, split.overlap)
    return plain.chunk_all_indices, markdown.chunk_all_indices


def load_tokenizer(split: Split, place: SourcePlace) -> str:
    """Return the model's tokenizer as JSON, with truncation and padding switched off.

    Raise InvalidOption if passages would be longer than the model reads.
    """
    spec = place.find_spec()
    if spec is None:
        raise InvalidOption(
            "Splitting by tokens needs a collection whose model is known; split by paragraphs instead."
        )
    model = spec.model
    card = place.registry.card(model)
    max_tokens = min(spec.max_tokens, card.max_tokens)
    path = card.path / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceFailed(
            f"The model {model!r} has no usable tokenizer.json to count tokens with; split by paragraphs instead."
        ) from error
    # The special tokens that the tokenizer's post-processor adds.
    processor = tokenizer.get("post_processor") or {}
    num_special = USUAL_SPECIAL_TOKENS
    if processor.get("type") == "TemplateProcessing":
        num_special = sum("SpecialToken" in part for part in processor.get("single", ()))
    room = max_tokens - num_special
    if split.tokens > room:
        raise InvalidOption(
            f"Passages of {split.tokens} tokens would be truncated: {model!r} reads at most {max_tokens}, including "
            f"special tokens, which leaves {room}."
        )
    tokenizer["truncation"] = tokenizer["padding"] = None
    return json.dumps(tokenizer)
