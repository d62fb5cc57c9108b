"""Pairs of texts in the words of a reranker's template, tokenized as its authors' code does.

Tokens merge across the borders of texts, so each piece of a template is tokenized whole. If a pair has too
many tokens, its document is cut, and nothing else.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.jobs.item import TOO_MANY_TOKENS, ItemFailure
from vectormill.models.rerankers import DOCUMENT, INSTRUCTION, QUERY, Template, fill_in, strip_texts
from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts
from worker.tokens.tokenizer import Tokenizer, drop_rows, report_length

_MARK: Final = f"{{{DOCUMENT}}}"
# Documents of one token and of several. What their sequences end with alike is the end of the template.
SHORT_DOCUMENTS: Final = "0", "1 2 3 4"


def tokenize_worded(
    tokenizer: Tokenizer,
    template: Template,
    instruction: str,
    pairs: Sequence[tuple[str, str]],
    max_tokens: int,
    truncate: bool,
) -> TokenizedTexts:
    """Return the token ids of n pairs of query and document, each at most `max_tokens`.

    The document of a longer pair is cut, or the pair fails if `truncate` is False or if the rest leaves no
    room for a token of the document.
    """
    pieces = template.pieces if instruction else template.plain
    filled = [{INSTRUCTION: instruction, QUERY: first, DOCUMENT: second} for first, second in pairs]
    filled = [strip_texts(texts, template.strips) for texts in filled] if template.strips else filled
    parts: list[Ragged] = []
    place = next(number for number, piece in enumerate(pieces) if _MARK in piece)
    around = [_split(pieces[place], texts) for texts in filled]
    limit = max_tokens if truncate else None
    for number, piece in enumerate(pieces):
        if number == place:
            parts.append(tokenizer.encode_between([texts[DOCUMENT] for texts in filled], around, limit))
        else:
            parts.append(_encode_distinct(tokenizer, [fill_in(piece, texts) for texts in filled]))
    totals = _add_lengths(parts)
    is_long = totals > max_tokens
    failures: dict[int, ItemFailure] = {}
    if not truncate:
        failures = {
            index: report_length(int(totals[index]), max_tokens) for index in np.flatnonzero(is_long).tolist()
        }
    elif is_long.any():
        room = max_tokens - (totals - parts[place].lengths)  # [n], for the piece with the document
        parts[place], failures = _cut(tokenizer, parts[place], room, np.flatnonzero(is_long), around)
    n = len(pairs)
    order = np.arange(len(parts) * n).reshape(len(parts), n).T.ravel()  # piece by piece, pair after pair
    ids = Ragged.from_lengths(Ragged.join(parts).take(order).values, _add_lengths(parts))
    has_failed = np.isin(np.arange(n), list(failures))
    return TokenizedTexts(drop_rows({INPUT_IDS: ids}, has_failed), is_long & ~has_failed, failures)


def _split(piece: str, texts: dict[str, str]) -> tuple[str, str]:
    """Return what stands before and behind the document in its piece."""
    before, _, behind = piece.partition(_MARK)
    return fill_in(before, texts), fill_in(behind, texts)


def _encode_distinct(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    """Return the tokens of each text; equal texts, such as a query with many documents, are read once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    rows = tokenizer.encode_between(list(numbers), [("", "")] * len(numbers), None)
    return rows.take(np.array([numbers[text] for text in texts], dtype=np.int64))


def _add_lengths(parts: Sequence[Ragged]) -> NDArray[np.int64]:
    """Return how many tokens each pair has in all of its pieces [n]."""
    totals: NDArray[np.int64] = np.stack([part.lengths for part in parts]).sum(axis=0)
    return totals


def _cut(
    tokenizer: Tokenizer,
    rows: Ragged,
    room: NDArray[np.int64],
    chosen: NDArray[np.int64],
    around: Sequence[tuple[str, str]],
) -> tuple[Ragged, dict[int, ItemFailure]]:
    """Return the rows with the chosen ones cut to `room` within their documents, and failures by index."""
    frames = [around[index] for index in chosen.tolist()]
    shortest, others = (
        _encode_distinct(tokenizer, [f"{before}{document}{behind}" for before, behind in frames])
        for document in SHORT_DOCUMENTS
    )
    cut: list[NDArray[np.int32]] = []
    failures: dict[int, ItemFailure] = {}
    for number, index in enumerate(chosen.tolist()):
        one, other = shortest.row(number), others.row(number)
        least = min(len(one), len(other))
        differs = np.flatnonzero(one[::-1][:least] != other[::-1][:least])
        # How many tokens follow the document, whatever its last word is.
        num_behind = (int(differs[0]) if len(differs) else least) if frames[number][1] else 0
        keep = int(room[index]) - num_behind
        cut.append(np.concatenate([rows.row(index)[: max(keep, 0)], one[len(one) - num_behind :]]))
        if len(one) > room[index]:
            failures[index] = ItemFailure(
                TOO_MANY_TOKENS,
                "the instruction, the query and the template leave no room for the document; max_tokens is "
                f"{len(one) - int(room[index])} too small",
            )
    places = np.arange(len(rows))
    places[chosen] = len(rows) + np.arange(len(chosen))
    return Ragged.join([rows, Ragged.from_rows(cut, np.int32)]).take(places), failures
