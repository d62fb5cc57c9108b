"""Draw a bar chart as an SVG that suits light and dark pages: the README's picture of measured speed."""

from collections.abc import Sequence
from html import escape
from typing import Final

WIDTH, LABEL, BAR, ROW, TOP = 760, 250, 400, 30, 46
STYLE: Final = (
    "text{font:14px system-ui,sans-serif;fill:#24292f}.note{fill:#57606a;font-size:12px}.bar{fill:#8c959f}"
    ".ours{fill:#2f6f9f}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b1}.bar{fill:#6e7681}"
    ".ours{fill:#58a6d6}}"
)


def draw_bars(title: str, note: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Return an SVG with one bar for each row of name, value and what is written behind the bar.

    The first row is set off from the others; all values are in the same unit and above 0.
    """
    longest = max(value for _, value, _ in rows)
    height = TOP + ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text x="0" y="20" font-weight="600">{escape(title)}</text>',
    ]
    for number, (name, value, told) in enumerate(rows):
        top = TOP + ROW * number
        length = round(BAR * value / longest)
        kind = "bar" if number else "ours"
        parts += [
            f'<text x="{LABEL - 10}" y="{top + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LABEL}" y="{top}" width="{length}" height="20" rx="2"/>',
            f'<text x="{LABEL + length + 8}" y="{top + 15}">{escape(told)}</text>',
        ]
    parts += [f'<text class="note" x="0" y="{height - 8}">{escape(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"
