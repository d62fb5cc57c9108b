"""host: the host's cost per text, measured with a device that takes no time.

`--against` adds a second checkout, in turns. Tokenizer, Celery, Valkey, Postgres and the model's card are the
real ones. A tree of links replaces the worker's encoder with one that answers at once, so that a worker of
any commit can be measured.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.children.null_device import link_tree, python_environment
from benchmarks.harness import ROOT, BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.ours import MODEL, OwnStack
from benchmarks.processes import CELERY_WORKER, MODEL_PROCESS, count_cpu_seconds, subtract_readings
from benchmarks.tables import NUMBER, RATIO, SHARE, Measure, Report, Spread, Table, at_least, tabulate
from benchmarks.texts import ExactTexts
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.bottleneck import STAGES
from vectormill.jobs.operations import JobBody
from vectormill.models.model_card import ModelCard
from vectormill.settings import process_environment

NOW: Final = "now"
BEFORE: Final = "before"
# Tokens of a text -> texts of a pass, which took some ten seconds when this was written.
NUM_TEXTS: Final[Mapping[int, int]] = {16: 100_000, 100: 40_000, 256: 20_000}
FEWEST_TEXTS: Final = 2_000
# Two passes of the same measurement once differed by half, so a single one says little.
FEWEST_PASSES: Final = 3
# The target is for the shortest texts, whose model takes the least time.
JUDGED_TOKENS: Final = 16
ANSWER_SECONDS: Final = 600.0
# The batch size of a worker on an accelerator. The worker believes it has a processor, whose default would be
# smaller.
BATCH_TOKENS: Final = {"VECTORMILL_WORKER_MAX_BATCH_TOKENS": "32768"}
# The processes of a stack whose time grows with the number of texts; all others share one column.
PROCESSES: Final = (CELERY_WORKER, MODEL_PROCESS, "api", "scheduler", "postgres", "valkey")
OTHERS: Final = "others"


@dataclass(slots=True)
class Measured:
    """The measurements of one checkout on texts of one length, a value per repetition."""

    num_texts: int
    jobs: list[dict[str, Any]] = field(default_factory=list)
    engine: list[dict[str, float]] = field(default_factory=list)
    tokenizer: list[dict[str, float]] = field(default_factory=list)

    def rates(self, passes: list[dict[str, Any]] | list[dict[str, float]]) -> list[float]:
        return [self.num_texts / each["seconds"] for each in passes]

    def micros(self, values: list[float]) -> str:
        """Format the median of seconds of passes as microseconds per text."""
        return NUMBER(1e6 * statistics.median(values) / self.num_texts)

    def engine_share(self) -> Spread:
        """Return the engine's speed relative to the bare tokenizer's."""
        return Spread.of_ratios(self.rates(self.engine), self.rates(self.tokenizer))

    def busy_share(self) -> Spread:
        """Return the share of the cores that was busy during a job."""
        cores = len(os.sched_getaffinity(0))
        return Spread.of([each["busy"] / (each["seconds"] * cores) for each in self.jobs])


def run(harness: Harness) -> Report:
    if harness.repeat < FEWEST_PASSES:
        raise BenchmarkFailed(
            f"Passes differ by half; use --repeat {FEWEST_PASSES} or more, and fewer --items."
        )
    card, texts = find_packaged(), ExactTexts(find_packaged().path)
    trees = {NOW: ROOT, **({BEFORE: harness.against} if harness.against else {})}
    sizes = choose_sizes(harness.items)
    results = {tokens: {name: Measured(count) for name in trees} for tokens, count in sizes.items()}
    with workplace(None) as directory, ExitStack() as exits:
        benches = {}
        for name, tree in trees.items():
            harness.say(f"starting the stack of {name}")
            benches[name] = exits.enter_context(Bench(tree, directory / name, card))
        for tokens, count in sizes.items():
            for number in range(harness.repeat):
                for name, bench in benches.items():
                    harness.say(f"{tokens} tokens, {name}, pass {number + 1} of {harness.repeat}")
                    found = results[tokens][name]
                    found.jobs.append(bench.run_job(texts.draw(tokens, count)))
                    found.engine.append(bench.run_engine(texts.draw(tokens, count)))
                    found.tokenizer.append(bench.run_tokenizer(texts.draw(tokens, count)))
    return Report(
        f"texts of {', '.join(map(str, sizes))} tokens, no two equal; {card.name}, a device that takes no time, "
        f"{len(os.sched_getaffinity(0))} cores, {harness.repeat} passes of each in turn.",
        (tabulate(judge(results[JUDGED_TOKENS])), *make_tables(results)),
        (
            "Texts per second are measured end to end from the first chunk's claim to the last commit, without the "
            "submission; for the engine alone with as many chunks of 512 at a time as a worker has slots; and for the "
            "tokenizer's encode_batch_fast of 512 texts, with a thread on every core.",
            "Processor time is the user and system time of whole processes, including the submission of the job; cores "
            "busy is that of all processes since the submission, divided by the seconds from claim to commit.",
            "The worker's own tokenizer is that of the checkout, word by word if that is exact.",
            "Stages are those of the job: seconds of threads, some of which wait for the interpreter lock.",
        ),
    )


def choose_sizes(num_items: int | None) -> dict[int, int]:
    """Return the number of texts of a pass by their tokens; `num_items` replaces that of the shortest ones."""
    share = (num_items or max(NUM_TEXTS.values())) / max(NUM_TEXTS.values())
    return {tokens: max(FEWEST_TEXTS, round(count * share)) for tokens, count in NUM_TEXTS.items()}


class Bench:
    """One checkout on the null device: its stack, which keeps running, and an engine for each pass."""

    def __init__(
        self,
        tree: Path,
        directory: Path,
        card: ModelCard,
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        is_null: bool = True,
        has_own_vectors: bool = False,
    ) -> None:
        """Prepare the stack; `variables` are added to its environment.

        Without `is_null` the checkout's own encoder computes on the devices that the variables name. With
        `has_own_vectors` the null device gives each text a vector of its own.
        """
        directory.mkdir(mode=0o711)
        self._directory = directory
        self._card = card
        self._linked = (
            link_tree(tree.resolve(), directory / "tree", has_own_vectors) if is_null else tree.resolve()
        )
        variables = {
            **variables, **python_environment(self._linked), **(BATCH_TOKENS if is_null else {}),
            "VECTORMILL_MODELS": json.dumps({MODEL: {"path": str(card.path)}}),
        }  # fmt: skip
        self.stack = OwnStack(directory / "data", variables, MODEL)
        self._num_jobs = 0

    def __enter__(self) -> "Bench":
        self.stack.__enter__()
        self.client = Client(self.stack.url)
        self.run_job(["The first text of all."])  # opens connections and fills caches
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.stack.__exit__()

    def run_job(self, texts: list[str]) -> dict[str, Any]:
        """Run a job; return its seconds, and the processor seconds that each process spent on it."""
        items: list[ItemJson] = [{"key": f"text-{number}", "text": text} for number, text in enumerate(texts)]
        self._num_jobs += 1
        return self.measure(
            lambda client: client.submit(items, model=MODEL, collection=f"host_{self._num_jobs}")
        )

    def measure(self, submit: Callable[[Client], JobBody]) -> dict[str, Any]:
        """Submit a job and wait for its end; return the seconds of both, and processor seconds by process."""
        before = count_cpu_seconds(self.stack.pid)
        asked = time.perf_counter()
        submitted = submit(self.client)
        submission_seconds = time.perf_counter() - asked
        between = count_cpu_seconds(self.stack.pid)
        job = self.client.wait(submitted["id"], poll_seconds=0.25)
        after = count_cpu_seconds(self.stack.pid)
        if job["state"] != "completed":
            raise BenchmarkFailed(f"The job ended {job['state']}.")
        started, finished = (
            datetime.fromisoformat(job[name] or "") for name in ("started_at", "finished_at")
        )
        return {
            "seconds": (finished - started).total_seconds(),
            "submission_seconds": submission_seconds,
            "cpu": subtract_readings(after, before),
            "busy": sum(subtract_readings(after, between).values()),
            "stages": job["stage_seconds"],
        }

    def run_engine(self, texts: list[str]) -> dict[str, float]:
        cache = self._directory / "engine"
        cache.mkdir(exist_ok=True)
        return self._run("engine", texts, cache_dir=str(cache))

    def run_tokenizer(self, texts: list[str]) -> dict[str, float]:
        return self._run("tokenizer", texts, max_tokens=self._card.max_tokens)

    def _run(self, kind: str, texts: list[str], **options: object) -> dict[str, float]:
        """Run a pass in a process of its own, from the linked tree, and return its figures."""
        path = self._directory / "texts.json"
        path.write_text(json.dumps(texts), encoding="utf-8")
        order = json.dumps({"texts": str(path), "model": str(self._card.path), **options})
        environment = {**process_environment(), **python_environment(self._linked), **BATCH_TOKENS}
        command = [sys.executable, "-m", "benchmarks.children.host_pass", kind, order]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=ANSWER_SECONDS
        )
        if done.returncode:
            raise BenchmarkFailed(f"A pass of the {kind} failed: {done.stderr.strip()[-600:]}")
        answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer


def judge(found: Mapping[str, Measured]) -> list[Measure]:
    """Return the measures with targets, for the shortest texts."""
    now, before = found[NOW], found.get(BEFORE)
    measures = [
        at_least("engine alone, to the bare tokenizer", now.engine_share(), 0.7, SHARE),
        at_least("cores busy, end to end", now.busy_share(), 0.9, SHARE),
    ]
    if before is not None:
        ratio = Spread.of_ratios(now.rates(now.jobs), before.rates(before.jobs))
        measures.insert(0, at_least(f"end to end, to {BEFORE}", ratio, 1.0, RATIO))
    return measures


def make_tables(results: Mapping[int, Mapping[str, Measured]]) -> list[Table]:
    """Return tables of texts/s, processor time by process, and time of stages, by length and checkout."""
    rates: dict[str, Callable[[Measured], str]] = {
        "end to end": lambda found: NUMBER(Spread.of(found.rates(found.jobs))),
        "engine alone": lambda found: NUMBER(Spread.of(found.rates(found.engine))),
        "bare tokenizer": lambda found: NUMBER(Spread.of(found.rates(found.tokenizer))),
        "engine to tokenizer": lambda found: SHARE(found.engine_share()),
        "cores busy": lambda found: SHARE(found.busy_share().median),
    }

    def spent(name: str) -> Callable[[Measured], str]:
        return lambda found: found.micros([count_seconds(each["cpu"], name) for each in found.jobs])

    micros = {name: spent(name) for name in (*PROCESSES, OTHERS)} | {
        "together": lambda found: found.micros([sum(each["cpu"].values()) for each in found.jobs]),
        "bare tokenizer": lambda found: found.micros([each["bare_cpu"] for each in found.tokenizer]),
        "own tokenizer": lambda found: found.micros([each["own_cpu"] for each in found.tokenizer]),
        "engine alone": lambda found: found.micros([each["engine_cpu"] for each in found.engine]),
    }

    def at_work(stage: str) -> Callable[[Measured], str]:
        return lambda found: found.micros([each["stages"].get(stage, 0.0) for each in found.jobs])

    titled = {
        "texts of": rates,
        "µs a text": micros,
        "µs a text, by stage": {each: at_work(each) for each in STAGES},
    }
    return [
        Table(
            (title, *columns),
            tuple(
                (f"{tokens} tokens, {name}", *(write(found) for write in columns.values()))
                for tokens, named in results.items()
                for name, found in named.items()
            ),
        )
        for title, columns in titled.items()
    ]


def count_seconds(spent: Mapping[str, float], name: str) -> float:
    if name == OTHERS:
        return sum(seconds for other, seconds in spent.items() if other not in PROCESSES)
    return spent.get(name, 0.0)
