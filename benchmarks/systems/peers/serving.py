"""The child's side of benchmarks.systems.child: loads an encoder, then does what each line on standard input says.

Knows no encoder, and imports numpy and the standard library alone: it runs in the environments of peers too. Answers
are lines of JSON on what standard output was; what libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.protocol import ENCODE, REPORT, SAVE, WARM_UP, ChildOrder, Pass

WARM_UP_SHARE = 10


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made of some texts."""

    vectors: NDArray[np.float32]  # [n, dimension]
    num_tokens: int
    num_computed_tokens: int
    seconds: float | None = None  # where not all that it did is to count


class Encoder(Protocol):
    """What is measured."""

    def __call__(self, texts: list[Any], /) -> Encoded:
        """Of strings, or of pairs of them."""
        ...

    def report(self) -> dict[str, Any]:
        """What it says of itself, as a JSON object; empty where it has nothing to say."""
        ...


def read_order() -> ChildOrder:
    """What the parent wrote on the command line."""
    return ChildOrder(**json.loads(sys.argv[1]))


def serve(order: ChildOrder, load: Callable[[ChildOrder], Encoder]) -> None:
    """Answers commands until standard input ends."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)

        def answer(values: dict[str, Any]) -> None:
            output.write(json.dumps(values) + "\n")
            output.flush()

        mixes: dict[str, list[Any]] = json.loads(Path(order.texts).read_text(encoding="utf-8"))
        encode = load(order)
        answer({})
        last: NDArray[np.float32] | None = None
        for line in sys.stdin:
            command, _, mix = line.strip().partition(" ")
            if command == WARM_UP:
                encode(mixes[mix][::WARM_UP_SHARE])
                answer({})
            elif command == ENCODE:
                started = time.perf_counter()
                encoded = encode(mixes[mix])
                seconds = time.perf_counter() - started if encoded.seconds is None else encoded.seconds
                last = encoded.vectors
                answer(asdict(Pass(seconds, encoded.num_tokens, encoded.num_computed_tokens)))
            elif command == SAVE:
                assert last is not None, "there are no vectors before the first pass"
                np.save(order.vectors, last)
                answer({})
            elif command == REPORT:
                answer(encode.report())
            else:
                raise ValueError(f"{command!r} is no command")
