"""embeddings: rate and latency of requests for a few texts, by /v1/embeddings and by infinity's server."""

import itertools
import random
from typing import Any, Final

from benchmarks.clients import PEER, PEER_MODEL, ROUND_SECONDS, InfinityServer, Rounds, Target
from benchmarks.harness import Harness
from benchmarks.ours import OwnStack
from benchmarks.tables import Report, tabulate
from benchmarks.texts import list_queries
from vectormill.cli.stack import workplace
from vectormill.models.registry import DEFAULT_MODEL

OURS: Final = "ours"
MOST_TEXTS: Final = 8


def run(harness: Harness) -> Report:
    choose = random.Random(16)
    texts = itertools.cycle(list_queries(1000))
    inputs = itertools.cycle(
        [list(itertools.islice(texts, choose.randint(1, MOST_TEXTS))) for _ in range(1000)]
    )
    rounds = Rounds()
    with workplace(None) as directory:
        with InfinityServer(directory / "infinity.log", lambda texts: make_body(PEER_MODEL, texts)) as peer:
            ask(harness, rounds, PEER, peer.target, inputs)
        with OwnStack(directory) as stack:
            url = f"{stack.url}/v1/embeddings"
            target = Target(url, lambda texts: make_body(DEFAULT_MODEL, texts), stack.pid)
            ask(harness, rounds, OURS, target, inputs)
    return Report(
        f"One to {MOST_TEXTS} short texts per request, base64, {harness.repeat} rounds of {ROUND_SECONDS:g} s.",
        (tabulate(rounds.judge(OURS)), rounds.tabulate(), rounds.tabulate_costs(OURS, PEER)),
        (
            "Both get the same bodies, except for the name of the model; infinity's server uses torch and its own "
            "defaults. The clients share the cores with the servers.",
            "The cost of a request for the host excludes our model process; infinity's server contains its model.",
        ),
    )


def make_body(model: str, texts: list[str]) -> dict[str, Any]:
    return {"model": model, "input": texts, "encoding_format": "base64"}  # as the official client


def ask(harness: Harness, rounds: Rounds, system: str, target: Target, inputs: Any) -> None:
    """Send one request to warm up, then run the load test as often as the harness says."""
    Rounds().ask(system, target, inputs)
    for number in range(harness.repeat):
        harness.say(f"{system}, round {number + 1} of {harness.repeat}")
        rounds.ask(system, target, inputs)
