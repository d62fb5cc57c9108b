"""The process that reads a model's files, which are a stranger's bytes: without secrets, and within limits.

`card_reader` starts it. It answers in lines of JSON: a text for each file of the model that it opens, so that the one
on which it is ended is known, and at last the card, or why there is none.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import TableMissing
from vectormill.models.model_entry import ModelEntry

# A refusal may quote what stands in a file.
MOST_REASON_CHARS: Final = 2_000


def main(question: str) -> None:
    """Answer the question of `card_reader`, and write which files of the model are opened for it."""
    name, directory, entry, needs_weights, must_encode, limits = json.loads(question)
    limit(limits)
    opened = [directory]

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if path.startswith(f"{directory}/") and path != opened[0]:
            opened[0] = path
            os.write(1, json.dumps(path).encode() + b"\n")

    sys.addaudithook(note)
    answer: dict[str, Any] = {}
    try:
        answer["card"] = asdict(
            read_model_card(
                name,
                Path(directory),
                ModelEntry(**entry),
                needs_weights=needs_weights,
                must_encode=must_encode,
            )
        )
    except (ModelError, TableMissing) as error:
        answer |= {"refusal": type(error).__name__, "reason": str(error)[:MOST_REASON_CHARS]}
    except MemoryError as error:
        answer["refusal"] = type(error).__name__
    except Exception as error:  # noqa: BLE001 - a damaged file may cause any
        why = f"{type(error).__name__}: {error}"[:MOST_REASON_CHARS]
        reason = f"The files of model {name!r} cannot be read, of which {opened[0]} was the last: {why}."
        answer |= {"refusal": ModelError.__name__, "reason": reason}
    sys.stdout.write(
        json.dumps(answer, default=lambda it: str(it) if isinstance(it, Path) else list(it)) + "\n"
    )


def limit(limits: Mapping[str, int]) -> None:
    """Lower the limits of this process, but none below the hard one, at which nothing is told."""
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        hard = most + 1 if hard == resource.RLIM_INFINITY else min(most + 1, hard)
        try:
            resource.setrlimit(kind, (min(most, hard), hard))
        except (OSError, ValueError):  # macOS has some limits only in name
            continue
