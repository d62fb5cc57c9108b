"""The child's side of benchmarks.systems.child: loads an encoder, then does what each line on standard input says.

Knows no encoder. Answers are lines of JSON on what standard output was; what libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.child import ChildOrder
from benchmarks.systems.system import Pass
from benchmarks.texts import take_evenly

WARM_UP_SHARE = 10


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made of some texts."""

    vectors: NDArray[np.float32]  # [n, dimension]
    num_tokens: int
    num_computed_tokens: int


Encode = Callable[[list[str]], Encoded]


def read_order() -> ChildOrder:
    """What the parent wrote on the command line."""
    return ChildOrder(**json.loads(sys.argv[1]))


def serve(order: ChildOrder, load: Callable[[ChildOrder], Encode]) -> None:
    """Answers commands until standard input ends."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)

        def answer(values: dict[str, Any]) -> None:
            output.write(json.dumps(values) + "\n")
            output.flush()

        texts: list[str] = json.loads(Path(order.texts).read_text(encoding="utf-8"))
        encode = load(order)
        answer({})
        last: NDArray[np.float32] | None = None
        for line in sys.stdin:
            command = line.strip()
            if command == "warm_up":
                encode(take_evenly(texts, max(1, len(texts) // WARM_UP_SHARE)))
                answer({})
            elif command == "encode":
                started = time.perf_counter()
                encoded = encode(texts)
                seconds = time.perf_counter() - started
                last = encoded.vectors
                answer(asdict(Pass(seconds, encoded.num_tokens, encoded.num_computed_tokens)))
            elif command == "save":
                assert last is not None, "there are no vectors before the first pass"
                np.save(order.vectors, last)
                answer({})
            else:
                raise ValueError(f"{command!r} is no command")
