"""The process that reads a model's files, which are a stranger's bytes: without secrets, and within limits.

Only what stands in these files is evaluated here: chat templates, the headers of pickles, JSON. `card_reader` starts
the process with its question as an argument. It answers in lines of JSON: a text for each file of the model that it
opens, so that one on which it is ended is known, and at last the card, or why there is none.
"""

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import TableMissing
from vectormill.models.model_entry import ModelEntry

# A refusal may quote what stands in a file.
MOST_REASON_CHARS: Final = 2_000


def main(arguments: str) -> None:
    """Answer one question, whose fields are arguments of `answer` and the limits."""
    question = json.loads(arguments)
    for name, most in question.pop("limits").items():
        limit(getattr(resource, name), most)
    sys.stdout.write(json.dumps(answer(**question), default=_simplify) + "\n")


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, unless it is lower already. At the hard one of processor time nothing is told."""
    hard = resource.getrlimit(kind)[1]
    hard = most + 1 if hard == resource.RLIM_INFINITY else min(most + 1, hard)
    try:
        resource.setrlimit(kind, (min(most, hard), hard))
    except (OSError, ValueError):  # macOS has some limits only in name
        return


def answer(
    name: str, directory: str, entry: dict[str, Any], needs_weights: bool, must_encode: bool
) -> dict[str, Any]:
    """Return the card, or the kind of refusal and the reason."""
    opened = [""]

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if path.startswith(f"{directory}/") and path != opened[-1]:
            opened[:] = [path]
            os.write(1, json.dumps(path).encode() + b"\n")

    sys.addaudithook(note)
    try:
        card = read_model_card(
            name,
            Path(directory),
            ModelEntry(**entry),
            needs_weights=needs_weights,
            must_encode=must_encode,
        )
    except (ModelError, TableMissing) as error:
        return {"refusal": type(error).__name__, "reason": str(error)[:MOST_REASON_CHARS]}
    except MemoryError:
        return {"refusal": MemoryError.__name__}
    except Exception as error:  # noqa: BLE001 - a damaged file may cause any
        told = f"{type(error).__name__}: {error}"[:MOST_REASON_CHARS]
        reason = f"The files of model {name!r} cannot be read, of which {opened[0] or directory} was the last: {told}."
        return {"refusal": ModelError.__name__, "reason": reason}
    return {"card": asdict(card)}


def _simplify(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)
