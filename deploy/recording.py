"""Record a command in a terminal as one animated SVG: the README's picture of a real run.

    python -m deploy.recording docs/pictures/demo.svg -- vectormill demo

The command runs under a pseudo-terminal; its output is rendered as a terminal would, and some of the
resulting screens become frames of the picture. Nothing is invented, but pauses are shortened. Supports the
control sequences that Rich uses.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

COLUMNS, ROWS = 100, 34
MAX_FRAMES: Final = 12
# The shortest and longest time of a frame, and the time of the last one, in seconds.
SHORTEST, LONGEST, LAST = 0.6, 1.6, 6.0
# Output of more lines than these at once is shown in steps, so that nothing scrolls by unseen.
STEP_LINES: Final = 14
CHAR_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 17, 14
SEQUENCE: Final = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]")
COLORS: Final = {
    31: "#f2777a",
    32: "#99cc99",
    33: "#ffcc66",
    34: "#6699cc",
    35: "#cc99cc",
    36: "#66cccc",
    90: "#7f7f7f",
}
COLORS_256: Final = {197: "#f92672", 237: "#3a3a3a", 106: "#729c1f"}
PLAIN: Final = "#d3d0c8"
FONT: Final = "14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"

Cell = tuple[str, str, bool]  # character, color, whether it is bold
Screen = tuple[tuple[Cell, ...], ...]


@dataclass(slots=True)
class Terminal:
    """A terminal that keeps all lines of cells ever written; the screen shows the last ones."""

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    color: str = PLAIN
    is_bold: bool = False

    def write(self, text: str) -> None:
        place = 0
        for match in SEQUENCE.finditer(text):
            self._print(text[place : match.start()])
            if match[2]:
                self._obey(match[1], match[2])
            place = match.end()
        self._print(text[place:])

    def screen(self) -> Screen:
        end = len(self.lines) if self.lines[-1] else len(self.lines) - 1
        return tuple(tuple(line) for line in self.lines[max(0, end - ROWS) : end])

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._go_to(self.row + 1)
            elif character == "\r":
                self.column = 0
            elif character >= " ":
                if self.column >= COLUMNS:
                    self._go_to(self.row + 1)
                    self.column = 0
                line = self.lines[self.row]
                line += [(" ", PLAIN, False)] * (self.column + 1 - len(line))
                line[self.column] = (character, self.color, self.is_bold)
                self.column += 1

    def _go_to(self, row: int) -> None:
        self.row = max(0, row)
        self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]

    def _obey(self, numbers: str, letter: str) -> None:
        first = int(numbers) if numbers.isdigit() else 0
        if letter == "A":
            self._go_to(self.row - max(1, first))
        elif letter == "K":
            self.lines[self.row] = [] if first == 2 else self.lines[self.row][: self.column]
        elif letter == "m":
            self._paint([int(number or 0) for number in numbers.split(";")])

    def _paint(self, codes: list[int]) -> None:
        if codes[:2] in ([38, 5], [38, 2]):
            wide = codes[1] == 2
            rgb = "#{:02x}{:02x}{:02x}".format(*codes[2:5]) if wide else COLORS_256.get(codes[2], PLAIN)
            self.color, codes = rgb, codes[5:] if wide else codes[3:]
        for code in codes:
            if code == 0:
                self.color, self.is_bold = PLAIN, False
            elif code == 1:
                self.is_bold = True
            else:
                self.color = COLORS.get(code, self.color)


def run(command: Sequence[str], said: str) -> tuple[list[tuple[float, Screen]], int]:
    """Run the command. Return every screen with its time in seconds, and the exit status."""
    terminal = Terminal()
    terminal.write(f"\x1b[32m$\x1b[0m \x1b[1m{said}\x1b[0m\r\n")
    begun = time.monotonic()
    screens = [(0.0, terminal.screen())]
    child, descriptor = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], list(command))
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    for text in read_all(descriptor):
        for step in cut(text):
            terminal.write(step)
            screens.append((time.monotonic() - begun, terminal.screen()))
    return screens, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_all(descriptor: int) -> Iterator[str]:
    """Yield the output as text, in the pieces in which it arrives."""
    rest = b""
    while True:
        select.select([descriptor], [], [])
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # the command has closed the terminal
            return
        if not data:
            return
        time.sleep(0.03)  # wait for the rest of the same output
        rest += data
        text = rest.decode("utf-8", errors="ignore")
        rest = b"" if text.encode() == rest else rest[len(text.encode()) :]
        yield text


def cut(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for start in range(0, len(lines), STEP_LINES):
        yield "".join(lines[start : start + STEP_LINES])


def choose(screens: Sequence[tuple[float, Screen]]) -> list[tuple[float, Screen]]:
    """Choose the screens to show, and the seconds of each.

    The first and the last ones are chosen, and evenly spaced ones between them.
    """
    distinct = [next(group) for _, group in groupby(screens, key=lambda each: each[1])]
    tail = distinct[-5:]
    body = distinct[1:-5]
    wanted = MAX_FRAMES - len(tail) - 1
    step = max(1, -(-len(body) // wanted))
    chosen = [distinct[0], *body[step - 1 :: step], *tail] if len(distinct) > len(tail) else distinct
    shown = [min(LONGEST, max(SHORTEST, after[0] - before[0])) for before, after in pairwise(chosen)]
    return [(seconds, screen) for seconds, (_, screen) in zip([*shown, LAST], chosen, strict=True)]


def draw(frames: Sequence[tuple[float, Screen]], title: str) -> str:
    """Return the frames as one animated SVG.

    With reduced motion only the last frame is shown.
    """
    width, height = COLUMNS * CHAR_WIDTH + 2 * MARGIN, ROWS * LINE_HEIGHT + 3 * MARGIN
    total = sum(seconds for seconds, _ in frames)
    style, groups, start = [], [], 0.0
    for number, (seconds, screen) in enumerate(frames):
        begin, end = 100 * start / total, 100 * (start + seconds) / total
        start += seconds
        style.append(
            f"@keyframes f{number}{{0%,{begin:.2f}%{{opacity:0}}{begin + 0.01:.2f}%,{end:.2f}%{{opacity:1}}"
            f"{min(100, end + 0.01):.2f}%,100%{{opacity:{int(number == len(frames) - 1)}}}}}"
            f"#f{number}{{opacity:0;animation:f{number} {total:.1f}s step-end infinite}}"
        )
        groups.append(f'<g id="f{number}">{"".join(draw_lines(screen))}</g>')
    still = "".join(
        f"#f{number}{{animation:none;opacity:{int(number == len(frames) - 1)}}}"
        for number in range(len(frames))
    )
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"<title>{name}</title><style>text{{font:{FONT};fill:{PLAIN};white-space:pre}}.b{{font-weight:bold}}"
        f"{''.join(style)}@media (prefers-reduced-motion:reduce){{{still}}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#1d1f21"/>{"".join(groups)}</svg>\n'
    )


def draw_lines(screen: Screen) -> Iterator[str]:
    for row, line in enumerate(screen):
        y, column = 2 * MARGIN + row * LINE_HEIGHT, 0
        for (color, is_bold), cells in groupby(line, key=lambda cell: cell[1:]):
            words = "".join(cell[0] for cell in cells)
            if words.strip():
                paint = "" if color == PLAIN else f' style="fill:{color}"'
                weight = ' class="b"' if is_bold else ""
                place = f'x="{MARGIN + column * CHAR_WIDTH:.1f}" y="{y}" textLength="{len(words) * CHAR_WIDTH:.1f}"'
                yield f"<text {place}{paint}{weight}>{escape(words)}</text>"
            column += len(words)


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a command as an animated SVG.")
    parser.add_argument("out", type=Path)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    said = " ".join(given.command)
    screens, status = run(given.command, said)
    if status == 0:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(draw(choose(screens), f"{said}, recorded in a terminal"), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
