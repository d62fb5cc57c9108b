"""Convert a notebook to a page with its texts, its code and the outputs of the last run. Runs nothing."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def render_notebook(path: Path) -> str:
    """Return the notebook as Markdown, one cell after the other."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(part for cell in notebook["cells"] for part in render_cell(cell))


def render_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source:
        yield f"```python\n{source}\n```"
        yield from (shown for output in cell["outputs"] if (shown := render_output(output)))


def render_output(output: dict[str, Any]) -> str | None:
    """Render an output as text or as a picture; return None if only a notebook could show it."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = base64.b64encode(base64.b64decode("".join(data["image/png"]))).decode()
        return f"![](data:image/png;base64,{picture})"
    text = "".join(output.get("text", data.get("text/plain", ()))).rstrip()
    return f"```text\n{text}\n```" if text else None
