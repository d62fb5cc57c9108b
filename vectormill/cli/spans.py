"""Mark extracted spans in texts for display. Reads no files and calls no service."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Records as the API returns them: paths of steps {"type", "span", "offset"}.
Records = Sequence[Sequence[Mapping[str, Any]]]


def mark_spans(text: str, records: Records) -> str:
    """Return the text with each span in brackets, followed by its types: `[Ada](person) wrote it.`

    Labels that are not spans of the text, such as a class, come before the text.
    """
    types: dict[tuple[int, int], dict[str, None]] = {}
    labels: dict[str, None] = {}
    for record in records:
        for step in record:
            start, end = step["offset"]
            if text[start:end] == step["span"] and start < end:
                types.setdefault((start, end), {})[step["type"]] = None
            else:
                labels[step["type"]] = None
    marks: dict[int, list[tuple[int, str]]] = {}
    for (start, end), names in types.items():
        # At the same position, inner spans close before outer ones, and outer ones open before inner ones.
        marks.setdefault(start, []).append((1_000_000 - end, "["))
        marks.setdefault(end, []).append((-start, f"]({', '.join(names)})"))
    parts, before = [], 0
    for place in sorted(marks):
        parts.append(text[before:place])
        parts += [mark for _, mark in sorted(marks[place], key=lambda each: (each[1] == "[", each[0]))]
        before = place
    parts.append(text[before:])
    return "".join([*(f"({label}) " for label in labels), *parts])


def show_texts(items: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], most: int) -> list[str]:
    """Return a line for each of the first `most` texts that have records.

    Items and rows come in the order of submission.
    """
    lines: list[str] = []
    texts = iter(items)
    for row in rows:
        if len(lines) == most:
            break
        text = next(item["text"] for item in texts if item["key"] == row["key"])
        lines.append(f"{row['key']}: {mark_spans(text, row['output'])}")
    return lines
