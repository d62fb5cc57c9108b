"""`python -m benchmarks.systems.host.tokenizer_pass ORDER`: the bare Rust tokenizer, with a thread on every core, and
beside it the tokenizer that a worker of this checkout uses, which may have a faster way to the same tokens.
"""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.systems.host.made_up import find_module

# As many as a worker hands over at once: enough for all cores, and little enough to stay in their caches.
NUM_GROUP_TEXTS = 512


@dataclass(frozen=True, slots=True)
class TokenizerOrder:
    texts: str
    model: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenizerPass:
    """The speed and the processor time of the bare tokenizer, and the processor time of the worker's own."""

    seconds: float
    num_texts: int
    num_tokens: int
    cpu_seconds: float
    own_cpu_seconds: float


def main() -> None:
    order = TokenizerOrder(**json.loads(sys.argv[1]))
    texts: list[str] = json.loads(Path(order.texts).read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(Path(order.model) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(order.max_tokens)
    groups = [texts[start : start + NUM_GROUP_TEXTS] for start in range(0, len(texts), NUM_GROUP_TEXTS)]
    for group in groups[::10]:
        tokenizer.encode_batch_fast(group)
    before = read_cpu_seconds()
    started = time.perf_counter()
    for group in groups:
        tokenizer.encode_batch_fast(group)
    seconds = time.perf_counter() - started
    cpu_seconds = read_cpu_seconds() - before
    num_tokens = sum(len(each) for group in groups for each in tokenizer.encode_batch_fast(group))
    own = count_own_seconds(groups, Path(order.model), order.max_tokens)
    answer = TokenizerPass(seconds, len(texts), num_tokens, cpu_seconds, own)
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")


def count_own_seconds(groups: list[list[str]], model: Path, max_tokens: int) -> float:
    """Return the processor time of this checkout's own tokenizer, which has read a tenth of the groups before."""
    own: Any = find_module(("worker.tokens.tokenizer",)).Tokenizer(model)
    for group in groups[::10]:
        own.tokenize(group, max_tokens, True)
    before = read_cpu_seconds()
    for group in groups:
        own.tokenize(group, max_tokens, True)
    return read_cpu_seconds() - before


def read_cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


if __name__ == "__main__":
    main()
