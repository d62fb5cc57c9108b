"""The texts that are encoded: real ones that every machine has. Knows nothing of models."""

import functools
from collections.abc import Callable, Sequence

from vectormill.corpus import Docstring, read_docstrings, take_evenly
from vectormill.domain.jobs.chunk_size import choose_chunk_tokens
from vectormill.files.ndjson import ItemJson

# About as many as there are, those that occur again included.
NUM_LINES = 36_000


def list_docstrings(num_items: int | None = None) -> list[ItemJson]:
    """Every docstring of the standard library, or so many spread evenly over them, so that their lengths stay alike."""
    items: list[ItemJson] = [{"key": docstring.key, "text": docstring.text} for docstring in _read_once()]
    return items if num_items is None else take_evenly(items, num_items)


def list_lines(num_items: int) -> list[ItemJson]:
    """So many short texts, each under a key of its own: the lines of the docstrings, again and again if need be."""
    lines = [
        stripped
        for docstring in _read_once()
        for line in docstring.text.splitlines()
        if (stripped := line.strip())
    ]
    return [{"key": f"line-{number}", "text": lines[number % len(lines)]} for number in range(num_items)]


def list_distinct_lines(num_items: int) -> list[ItemJson]:
    """So many short texts of which no two are equal: equal ones would be encoded once.

    When the lines are used up they come again, behind the number of the round.
    """
    lines = list(dict.fromkeys(item["text"] for item in list_lines(NUM_LINES)))
    items: list[ItemJson] = []
    for number in range(num_items):
        rounds, place = divmod(number, len(lines))
        text = lines[place] if not rounds else f"{rounds} {lines[place]}"
        items.append({"key": f"line-{number}", "text": text})
    return items


def cut_chunks(texts: Sequence[bytes], count: Callable[[bytes], int], max_items: int) -> list[list[bytes]]:
    """The texts as a submission cuts them, which estimates their tokens by `count`."""
    chunks: list[list[bytes]] = [[]]
    num_tokens = num_before = 0
    for text in texts:
        is_full = num_tokens - num_before >= choose_chunk_tokens(num_before)
        if is_full or len(chunks[-1]) >= max_items:
            chunks.append([])
            num_before = num_tokens
        chunks[-1].append(text)
        num_tokens += count(text)
    return chunks


@functools.cache
def _read_once() -> tuple[Docstring, ...]:
    """To read the whole standard library takes seconds."""
    return tuple(read_docstrings())
