"""doctor: says what this machine has, what it lacks and what to do about it."""

from dataclasses import asdict
from typing import Final

import typer

from vectormill.cli.options import ApiUrl, DataDir, Json

app = typer.Typer()

STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command(epilog="Example: vectormill doctor --json\n\nExit codes: 0 nothing failed, 1 something did.")
def doctor(api_url: ApiUrl = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Check Python, packages, disk, memory, servers, devices and models, and say what to do."""
    from rich.console import Console
    from rich.text import Text

    from vectormill.cli.doctor.checks import FAIL, run_checks
    from vectormill.cli.views.listing import print_json
    from vectormill.settings import load_settings

    settings = load_settings(api_url=api_url, data_dir=data_dir)
    console = Console(soft_wrap=True, highlight=False)
    has_failed = False
    for finding in run_checks(settings):
        has_failed |= finding.status == FAIL
        if json:
            print_json(asdict(finding))
            continue
        line = Text.assemble(
            (f"{finding.status:<5}", STYLES[finding.status]), f"{finding.name}: {finding.detail}"
        )
        console.print(line)
        if finding.advice:
            console.print(Text(f"     → {finding.advice}"))
    raise typer.Exit(int(has_failed))
