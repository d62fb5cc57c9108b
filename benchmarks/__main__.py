"""`python -m benchmarks [NAME …]`: run the named benchmarks, or all, and print their reports.

`make bench` calls it.
"""

import argparse
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.harness import CARD, ONLY_NAMED, QUESTIONS, BenchmarkFailed, Harness
from benchmarks.tables import README, Report, replace_section
from vectormill.domain.errors import VectormillError

PLAIN_WIDTH = 160


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the help of each option says which benchmarks read it."""
    listed = "\n".join(f"  {name:<12} {question}" for name, question in QUESTIONS.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure speed and memory. Run nothing else at the same time.",
        epilog=f"benchmarks:\n{listed}\n\nWithout a name, all of them except {' and '.join(ONLY_NAMED)} run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a benchmark from the list below")
    add("--items", type=int, help="number of texts, instead of each benchmark's default")
    add("--rows", type=int, help="millions: number of rows, instead of 5,000,000")
    add(
        "--graph",
        type=int,
        nargs=2,
        metavar=("M", "EF"),
        help="millions: m and ef_construction of the index, instead of those that Vectormill chooses",
    )
    add("--repeat", type=int, default=3, help="repetitions of each measurement (3)")
    add(
        "--quick",
        action="store_true",
        help="a size that only shows that everything works: card, score, extract",
    )
    add("--write", action="store_true", help="write the tables to README.md")
    add("--device", help="engine: cpu or cuda; card: cuda, a device such as cuda:1, or cpu with --quick")
    add("--mix", action="append", default=[], dest="mixes", help="engine: one of its mixes; may be repeated")
    add("--system", action="append", default=[], dest="systems", help="engine: one system; may be repeated")
    add("--model-shape", action="append", default=[], dest="shapes", help="engine: random weights")
    add("--max-tokens", type=int, help="engine: tokens read of each text, instead of the model's 256")
    add(
        "--against",
        type=Path,
        help="host, queries: another checkout of the project, measured alternately with this one",
    )
    add("--state", type=Path, help="card: the folder for its records")
    add("--price", type=float, default=3.5, help="card: dollars an hour for the whole machine (3.5)")
    add("--minutes", type=float, default=9.5, help="card: end after this number of minutes (9.5)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if name not in QUESTIONS:
            parser.error(f"unknown benchmark {name!r}; expected one of: {', '.join(QUESTIONS)}")
    is_of_card = CARD in asked.names
    if is_of_card and len(asked.names) > 1:
        parser.error(f"{CARD} cannot be combined with other benchmarks")
    small = (
        asked.items
        or asked.rows
        or asked.graph
        or asked.mixes
        or asked.systems
        or asked.shapes
        or asked.max_tokens
        or asked.quick
    )
    if asked.write and (small or (asked.device not in (None, "cpu") and not is_of_card)):
        parser.error("--write needs the default measurement of each benchmark, on the CPU")
    harness = Harness(
        asked.repeat, asked.items, asked.device or ("cuda" if is_of_card else "cpu"), tuple(asked.mixes),
        tuple(asked.systems), tuple(asked.shapes), asked.max_tokens, asked.against, asked.state,
        asked.minutes, asked.quick, asked.write, asked.rows,
        asked.graph and tuple(asked.graph), asked.price,
    )  # fmt: skip
    # Handle SIGTERM as Ctrl-C: processes are stopped and temporary directories are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if not is_of_card:
        _ = harness.machine
    failures = 0
    for name in asked.names or [name for name in QUESTIONS if name not in ONLY_NAMED]:
        try:
            report = harness.answer(name)
        except (BenchmarkFailed, VectormillError, LookupError) as error:
            failures += 1
            print(f"{name} was not measured: {error}", file=sys.stderr)
            continue
        show(name, report)
        if asked.write:
            content = report.to_markdown(f"{datetime.now(UTC):%Y-%m-%d}", harness.machine.describe())
            README.write_text(replace_section(README.read_text("utf-8"), name, content), "utf-8")
    return 1 if failures else 0


def show(name: str, report: Report) -> None:
    """Print a report. Without a terminal there is no width, so tables are not narrowed to one."""
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    for number, table in enumerate(report.tables):
        console.print(table.to_terminal("" if number else f"{name}: {report.subject}"))
    for note in report.notes:
        console.print(f"  {note}", highlight=False, style="dim")


if __name__ == "__main__":
    sys.exit(main())
