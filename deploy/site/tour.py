"""The client's tour, run on a service: `python -m deploy.site.tour` writes docs/tour.ipynb with its current output.

`vectormill up` runs elsewhere. What only tells of this run, times and a page's identifiers, is left out.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

from vectormill.client import DEFAULT_URL

TOUR: Final = Path(__file__).resolve().parents[2] / "docs/tour.ipynb"
CONNECT: Final = "Client()"
LANGUAGE: Final = {"name": "python"}


def run_tour(api_url: str) -> Any:
    """Run the notebook on the service and return it with its outputs.

    Raise CellExecutionError if a cell fails.
    """
    notebook = read_notebook(TOUR)
    connecting = next(cell for cell in notebook.cells if CONNECT in cell.source)
    connecting.source = connecting.source.replace(CONNECT, f'Client("{api_url}")')
    with tempfile.TemporaryDirectory(prefix="vectormill-") as folder:
        runner = NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        runner.execute()
    connecting.source = connecting.source.replace(f'Client("{api_url}")', CONNECT)
    notebook.metadata.language_info = LANGUAGE
    return notebook


def read_notebook(path: Path) -> Any:
    """Read a notebook. Raise ValidationError if it is invalid."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api-url", default=DEFAULT_URL)
    parser.add_argument("--target", type=Path, default=TOUR)
    arguments = parser.parse_args()
    nbformat.write(run_tour(arguments.api_url), arguments.target)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
