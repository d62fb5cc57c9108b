"""Read the options of a source and how its documents are split, and refuse what does not fit. Opens no source."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE
from vectormill.operation import struct_of
from vectormill.sources.source import KINDS, Options, Source

# The types as which options are read.
BODIES: Final = {kind: struct_of(options) for kind, options in KINDS.items()}

NONE: Final = "none"
PARAGRAPHS: Final = "paragraphs"
TOKENS: Final = "tokens"


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for splitting a document into passages.

    By `paragraphs`, a passage is one or more whole paragraphs of `min_chars` to `max_chars` characters; a longer
    paragraph is cut between sentences. By `tokens`, a passage has up to `tokens` tokens of the model's tokenizer
    and shares `overlap` of them with the previous passage.
    """

    by: Literal["none", "paragraphs", "tokens"] = "none"
    tokens: Annotated[int, Meta(ge=8, le=1_000_000)] = 256
    overlap: Annotated[int, Meta(ge=0)] = 0
    min_chars: Annotated[int, Meta(ge=1)] = 200
    max_chars: Annotated[int, Meta(ge=16, le=1_000_000)] = 1500
    markdown: bool | None = None


def parse_options(source: Source) -> Options:
    """Return the options of the source's kind. Raise InvalidOption, naming the field, if one does not fit."""
    if source.kind not in KINDS:
        raise InvalidOption(f"Unknown source kind {source.kind!r}; expected one of: {', '.join(KINDS)}.")
    read = _convert(source.options, BODIES[source.kind], f"A source of kind {source.kind}")
    options = KINDS[source.kind](**msgspec.structs.asdict(read))
    options.check()
    return options


def parse_split(source: Source) -> Split:
    """Return how the source's documents are split into rows. Raise InvalidOption if `split` does not fit."""
    split: Split = _convert(source.split, Split, "The split")
    if split.by != NONE and source.options.get("text_pair") is not None:
        raise InvalidOption("Pairs of texts cannot be split; remove split or text_pair.")
    if split.by == TOKENS and split.overlap * 2 >= split.tokens:
        raise InvalidOption(
            f"overlap must be less than half of tokens, from 0 to {(split.tokens - 1) // 2}; got {split.overlap}."
        )
    if split.by == PARAGRAPHS and split.min_chars > split.max_chars:
        raise InvalidOption(
            f"min_chars ({split.min_chars}) must not be greater than max_chars ({split.max_chars})."
        )
    return split


def _convert(values: Mapping[str, Any], kind: type[Any], subject: str) -> Any:
    try:
        return msgspec.convert(dict(values), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, path = str(error).partition(" - at `")
        field = path.removesuffix("`").removeprefix("$").removeprefix(".")
        raise InvalidOption(f"{subject}{f', {field}' if field else ''}: {reason}.") from None


def refuse_unfit(source: Source, spec: EncodingSpec | None) -> None:
    """Raise InvalidOption if the source's rows (texts or pairs) do not suit the collection's task.

    `spec` is None if the collection does not exist yet; then every source is accepted.
    """
    if spec is None:
        return
    pair = source.options.get("text_pair")
    if pair is not None and not spec.reads_pairs:
        raise InvalidOption(
            f"The source sets text_pair to {pair!r}, but the collection's task, {spec.task}, reads one text per row; "
            "remove text_pair."
        )
    if pair is not None and parse_split(source).by != NONE:
        raise InvalidOption("Pairs of texts cannot be split; remove split.")
    # A classifier, which has labels, reads single texts too.
    if spec.task != JUDGE or spec.labels:
        return
    how_to_pair = KINDS[source.kind].how_to_pair
    if pair is None and how_to_pair is not None:
        raise InvalidOption(f"{spec.model!r} compares two texts{how_to_pair}.")
    if parse_split(source).by != NONE:
        raise InvalidOption("Pairs of texts cannot be split; remove split.")
