"""The child's side of benchmarks.turns.Child, and the protocol that both sides speak.

The child loads an encoder, then carries out each command line on standard input. Answers are lines of JSON on
the original standard output; whatever libraries print goes to standard error. This module imports numpy and
the standard library alone, because it also runs in the environments of peers.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

WARM_UP_SHARE = 10


@dataclass(frozen=True)
class ChildOrder:
    """The configuration that a benchmark passes to a child process at its start.

    `model` is a directory. `texts` is a JSON file: name of a mix -> its texts. The vectors of the last pass
    are saved at `vectors`; `cache_dir` is for anything else worth keeping. `options` depend on the kind of
    child.
    """

    model: str
    texts: str
    vectors: str
    cache_dir: str
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """The figures of encoding all texts once. Computed tokens include padding."""

    seconds: float
    num_tokens: int
    num_computed_tokens: int

    @property
    def padding_waste(self) -> float:
        """Return the share of the computed tokens that were padding."""
        return 1 - self.num_tokens / self.num_computed_tokens if self.num_computed_tokens else 0.0


@dataclass(frozen=True)
class Encoded:
    """The vectors of some texts and their token counts.

    `seconds` is set where only part of the call is timed.
    """

    vectors: NDArray[np.float32]  # [n, dimension]
    num_tokens: int
    num_computed_tokens: int
    seconds: float | None = None


class Encoder(Protocol):
    """An engine under measurement. It is called with a list of strings, or of pairs of strings."""

    def __call__(self, texts: list[Any], /) -> Encoded: ...

    def report(self) -> dict[str, Any]: ...


def serve(load: Callable[[ChildOrder], Encoder]) -> None:
    """Answer commands until standard input ends."""
    order = ChildOrder(**json.loads(sys.argv[1]))
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
            if command == "warm_up":
                encode(mixes[mix][::WARM_UP_SHARE])
                answer({})
            elif command == "encode":
                started = time.perf_counter()
                encoded = encode(mixes[mix])
                seconds = time.perf_counter() - started if encoded.seconds is None else encoded.seconds
                last = encoded.vectors
                answer(asdict(Pass(seconds, encoded.num_tokens, encoded.num_computed_tokens)))
            elif command == "save":
                assert last is not None, "there are no vectors before the first pass"
                np.save(order.vectors, last)
                answer({})
            elif command == "report":
                answer(encode.report())
            else:
                raise ValueError(f"unknown command {command!r}")
