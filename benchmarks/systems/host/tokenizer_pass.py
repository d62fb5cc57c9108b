"""`python -m benchmarks.systems.host.tokenizer_pass ORDER`: the bare Rust tokenizer, with a thread on every core.

The yardstick of the host: nothing that reads text can be faster than reading it.
"""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

# As many as a worker hands over at once: enough for all cores, and little enough to stay in their caches.
NUM_GROUP_TEXTS = 512


@dataclass(frozen=True, slots=True)
class TokenizerOrder:
    texts: str
    model: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenizerPass:
    seconds: float
    num_texts: int
    num_tokens: int
    cpu_seconds: float


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
    answer = TokenizerPass(seconds, len(texts), num_tokens, cpu_seconds)
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")


def read_cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


if __name__ == "__main__":
    main()
