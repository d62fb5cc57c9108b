"""`python -m benchmarks [NAME …]`: measures what is named, or everything, and shows it. `make bench` calls it."""

import signal
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Console

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.machine import detect_machine
from benchmarks.results.readme import write_section
from benchmarks.results.report import Report
from benchmarks.steps import Steps
from benchmarks.suite import BENCHMARKS
from vectormill.domain.errors import VectormillError

PLAIN_WIDTH: Final = 160

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def benchmarks(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help=f"{', '.join(BENCHMARKS)}; all of them when none is named."),
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Texts to use, instead of each benchmark's own number.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of what is timed.")] = 3,
    write: Annotated[bool, typer.Option("--write", help="Put the tables into benchmarks/README.md.")] = False,
) -> None:
    """Measure speed and memory. Let nothing else run meanwhile: there is no other way to a number."""
    unknown = [name for name in names or () if name not in BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if write and items is not None:
        raise typer.BadParameter("--write is for each benchmark's own number of texts; leave --items away")
    # As Ctrl-C does: what was started is stopped, and temporary directories go.
    signal.signal(signal.SIGTERM, lambda number, _: raise_exit(128 + number))
    console, failures = make_console(), []
    with Steps() as steps:
        steps.begin("matrix rate", 1)
        steps.step("measuring what the processor can do")
        order = Order(detect_machine(), steps, repeat, items)
        steps.end()
        for name in names or BENCHMARKS:
            try:
                report = BENCHMARKS[name](order)
            except (BenchmarkFailed, VectormillError) as error:
                failures.append(f"{name} was not measured: {error}")
                continue
            steps.end()
            show(report, console)
            if write:
                write_section(
                    name, report.to_markdown(f"{datetime.now(UTC):%Y-%m-%d}", order.machine.describe())
                )
    for failure in failures:
        typer.echo(failure, err=True)
    raise typer.Exit(1 if failures else 0)


def show(report: Report, console: Console) -> None:
    """The report on the terminal."""
    for number, table in enumerate(report.tables):
        console.print(table.to_terminal("" if number else f"{report.name}: {report.subject}"))
    for note in report.notes:
        console.print(f"  {note}", highlight=False, style="dim")


def make_console() -> Console:
    """Standard output; where it is no terminal it has no width either, and tables shall not be squeezed."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def raise_exit(status: int) -> None:
    raise SystemExit(status)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
