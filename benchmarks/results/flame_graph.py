"""A flame graph as SVG, from stacks and how often each was seen. Knows nothing of what was sampled.

Width is a frame's share of all samples, callers lie below what they called; a frame's title tells its share. Source:
Gregg, The Flame Graph (2016).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Final
from zlib import crc32

WIDTH: Final = 1200
ROW: Final = 15
HEAD: Final = 26
CHAR_WIDTH: Final = 6.3
# Narrower ones are left out: nobody can read them, and they are most of the file.
SMALLEST_SHARE: Final = 0.002


@dataclass(slots=True)
class Frame:
    """`count` is of all samples that passed through here."""

    name: str
    count: int = 0
    callees: "dict[str, Frame]" = field(default_factory=dict)

    def add(self, stack: list[str], count: int) -> None:
        """A stack from the outermost frame inwards."""
        frame = self
        frame.count += count
        for name in stack:
            frame = frame.callees.setdefault(name, Frame(name))
            frame.count += count


def read_folded(lines: Iterable[str]) -> Frame:
    """Lines such as `outer;inner 12`, which profilers write. The outermost frame is all of them together."""
    root = Frame("all")
    for line in lines:
        stack, _, count = line.strip().rpartition(" ")
        if stack:
            root.add(stack.split(";"), int(count))
    return root


def fold_perf_script(lines: Iterable[str]) -> Iterator[str]:
    """What `perf script` prints, as folded lines: of each sample a head, then its frames, the innermost first."""
    frames: list[str] = []
    for line in lines:
        if line.startswith(("\t", "  ")) and frames:
            parts = line.split()
            frames.append(parts[1].partition("+")[0] if len(parts) > 1 else "[unknown]")
        elif line.strip() and not frames:
            frames = [line.split()[0]]
        elif not line.strip() and frames:
            yield ";".join([frames[0], *reversed(frames[1:])]) + " 1"
            frames = []
    if frames:
        yield ";".join([frames[0], *reversed(frames[1:])]) + " 1"


def draw_flame_graph(root: Frame, title: str) -> str:
    """The SVG. Frames of the same name have the same colour."""
    rows: list[str] = []
    depth = max((level for level, _, _ in _place(root)), default=0)
    height = HEAD + (depth + 1) * ROW
    for level, start, frame in _place(root):
        left, width = WIDTH * start, WIDTH * frame.count / root.count
        top = height - (level + 1) * ROW
        told = escape(f"{frame.name}: {frame.count / root.count:.1%}")
        shown = escape(frame.name[: int(width / CHAR_WIDTH)]) if width > 4 * CHAR_WIDTH else ""
        text = f'<text x="{left + 2:.1f}" y="{top + 11}">{shown}</text>' if shown else ""
        rows.append(
            f'<g><title>{told}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 1}" '
            f'fill="{_colour(frame.name)}"/>{text}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
        f'font-size="10"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="4" y="16" font-size="13">{escape(title)}</text>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def find_shares(root: Frame) -> Mapping[str, float]:
    """The share of samples of each frame's own, without what it called; the largest first."""
    own: dict[str, int] = {}
    waiting = [root]
    while waiting:
        frame = waiting.pop()
        callees = list(frame.callees.values())
        own[frame.name] = own.get(frame.name, 0) + frame.count - sum(callee.count for callee in callees)
        waiting += callees
    ordered = sorted(own.items(), key=lambda entry: -entry[1])
    return {name: count / root.count for name, count in ordered if count}


def _place(root: Frame) -> Iterator[tuple[int, float, Frame]]:
    """Each frame that is wide enough, with its depth and where it begins, as a share of the whole."""
    waiting = [(0, 0.0, root)]
    while waiting:
        level, start, frame = waiting.pop()
        if not root.count or frame.count / root.count < SMALLEST_SHARE:
            continue
        yield level, start, frame
        for callee in sorted(frame.callees.values(), key=lambda each: each.name):
            waiting.append((level + 1, start, callee))
            start += callee.count / root.count


def _colour(name: str) -> str:
    """Warm, and the same for the same name in every graph."""
    number = crc32(name.encode())
    return f"rgb({205 + number % 50},{100 + number // 50 % 110},{60 + number // 5500 % 50})"
