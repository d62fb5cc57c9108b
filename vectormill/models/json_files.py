"""Read the JSON files of a model, and name the one that is damaged."""

import json
from pathlib import Path
from typing import Any

from vectormill.domain.errors import ModelError


def read_object(path: Path, model: str, *, is_needed: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file of a model; an empty one if no such file `is_needed` and there is none.

    Raise ModelError if the file cannot be read, or contains something else.
    """
    if not is_needed and not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"The file {path} of model {model!r} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"The file {path} of model {model!r} must contain a JSON object.")
    return found
