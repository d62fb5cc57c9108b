"""`python -m benchmarks [NAME …]`: measures what is named, or everything, and shows it. `make bench` calls it."""

import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from benchmarks.cases.engine.engine import SYSTEMS
from benchmarks.cases.gpu.plan import TOTAL_SECONDS
from benchmarks.mixes import NUM_TEXTS
from benchmarks.models.shapes import SHAPES
from benchmarks.order import CPU, CUDA, BenchmarkFailed, Order
from benchmarks.peers.catalogue import GPU_PEERS
from benchmarks.probes.machine import Machine, detect_machine
from benchmarks.results.readme import write_section
from benchmarks.results.report import Report
from benchmarks.steps import Steps
from benchmarks.suite import BENCHMARKS, GPU, QUICK, run_benchmarks
from benchmarks.systems.line_up import OURS

PLAIN_WIDTH: Final = 160
MINUTES: Final = TOTAL_SECONDS / 60

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def benchmarks(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]…", help=f"{', '.join(BENCHMARKS)}; all of them but {GPU} when none is named."
        ),
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Texts to use, instead of each benchmark's own number.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of what is timed.")] = 3,
    device: Annotated[
        str | None,
        typer.Option(
            help="engine: cpu, or cuda for models of random weights on the first GPU; placement: on two of them; "
            "gpu: cuda, a device such as cuda:1, or cpu with --quick."
        ),
    ] = None,
    mix: Annotated[
        list[str] | None, typer.Option(help=f"engine: one of {', '.join(NUM_TEXTS)}; may be repeated.")
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(help=f"engine: one of {', '.join(SYSTEMS)}; may be repeated.")
    ] = None,
    model_shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"engine, placement, footprint: random weights of the shape {', '.join(SHAPES)}; may be repeated."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=3, help="engine: tokens read of a text, instead of the model's own 256.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="host: another checkout of the project, measured in turns with this one.",
        ),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(file_okay=False, help="gpu: where its records are kept, to go on with.")
    ] = None,
    again: Annotated[
        list[str] | None, typer.Option(metavar="STEP", help="gpu: repeat this step; may be repeated.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="gpu: start no step that may end after so many.")
    ] = MINUTES,
    is_quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"{', '.join(QUICK)}: tiny models, to test the mechanics; no figure is worth anything.",
        ),
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Put the tables into benchmarks/README.md; gpu: and the card's switches in their file.",
        ),
    ] = False,
) -> None:
    """Measure speed and memory. Let nothing else run meanwhile: there is no other way to a number."""
    refuse_unknown(names or (), tuple(BENCHMARKS), "benchmark")
    names = names or [name for name in BENCHMARKS if name != GPU]
    is_gpu = refuse_mixed(names, {"--state": state, "--again": again})
    if is_quick and not set(names) <= set(QUICK):
        raise typer.BadParameter(f"--quick is of {', '.join(QUICK)}; name them alone")
    device = device or (CUDA if is_gpu else CPU)
    chosen = {
        "--items": items, "--mix": mix, "--system": system, "--model-shape": model_shape, "--max-tokens": max_tokens,
        "--quick": is_quick,
    }  # fmt: skip
    if write and device != CPU and not is_gpu:
        raise typer.BadParameter("--write is for the processor; a report on another device is only shown")
    for option, value in chosen.items():
        if write and value:
            raise typer.BadParameter(
                f"--write is for what each benchmark measures by itself; leave {option} away"
            )
    for values, known in ((mix, tuple(NUM_TEXTS)), (model_shape, tuple(SHAPES))):
        refuse_unknown(values or (), known)
    refuse_unknown(system or (), SYSTEMS if device == CPU else (*OURS, *(peer.name for peer in GPU_PEERS)))
    # As Ctrl-C does: what was started is stopped, and temporary directories go.
    signal.signal(signal.SIGTERM, lambda number, _: raise_exit(128 + number))
    reports: list[Report] = []
    failures: list[BenchmarkFailed] = []
    try:
        with Steps() as steps:
            order = Order(
                find_machine(steps),
                steps,
                repeat,
                items,
                device,
                tuple(mix or ()),
                tuple(system or ()),
                tuple(model_shape or ()),
                max_tokens,
                against,
                state,
                tuple(again or ()),
                minutes,
                is_quick,
                write,
            )
            for result in run_benchmarks(names, order):
                if isinstance(result, BenchmarkFailed):
                    failures.append(result)
                    continue
                reports.append(result)
                if write:
                    today = f"{datetime.now(UTC):%Y-%m-%d}"
                    write_section(result.name, result.to_markdown(today, order.machine.describe()))
    finally:
        # After the bars, which would be drawn over them; and after Ctrl-C too, for what was measured until then.
        console = make_console()
        for report in reports:
            show(report, console)
        for failure in failures:
            typer.echo(str(failure), err=True)
    raise typer.Exit(1 if failures else 0)


def refuse_mixed(names: Sequence[str], of_gpu: Mapping[str, object]) -> bool:
    """Whether it is the benchmark of a card. Raises typer.BadParameter for others beside it, or its options alone."""
    is_gpu = GPU in names
    if is_gpu and len(names) > 1:
        raise typer.BadParameter(f"{GPU} has a machine to itself; name it alone")
    for option, value in of_gpu.items():
        if value and not is_gpu:
            raise typer.BadParameter(f"{option} is of {GPU} alone")
    return is_gpu


def refuse_unknown(values: Sequence[str], known: Sequence[str], kind: str = "choice") -> None:
    """Raises typer.BadParameter with the names that there are."""
    for value in values:
        if value not in known:
            raise typer.BadParameter(f"there is no {kind} {value!r}; there are {', '.join(known)}")


def find_machine(steps: Steps) -> Machine:
    """The facts, and how fast the processor can multiply: measured first, while nothing of ours runs."""
    steps.begin("matrix rate", 1)
    steps.step("measuring what the processor can do")
    machine = detect_machine()
    steps.end()
    return machine


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
