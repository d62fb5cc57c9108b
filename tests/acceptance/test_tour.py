"""The client's tour does on a real service what its page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.site.tour import TOUR
from tests.acceptance.stack import Stack

# Another processor's last digits differ, and so do the widths of columns.
NUMBERS_AND_SPACES = re.compile(r"[-\d.,\s─═]+")


def list_results(path: Path) -> list[list[str]]:
    """Of each cell what it printed and gave, without numbers; a bar's last state tells of the time."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [
        [
            NUMBERS_AND_SPACES.sub(
                "", "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            )
            for output in cell["outputs"]
            if output["output_type"] != "display_data"
        ]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow  # a kernel of Jupyter's beside the whole stack
def test_the_tour_gives_what_its_page_shows(stack: Stack, tmp_path: Path) -> None:
    options = ["--api-url", stack.api_url, "--target", str(tmp_path / "tour.ipynb")]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.site.tour", *options],
        env=os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    assert list_results(tmp_path / "tour.ipynb") == list_results(TOUR)
    with stack.client() as client:
        assert "tour" not in [collection["name"] for collection in client.collections()]
