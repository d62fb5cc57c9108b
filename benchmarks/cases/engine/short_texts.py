"""short_texts: what tokenizer and database cost beside the model, where texts are short and there are many of them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.process_tree import (
    CELERY_WORKER,
    POSTGRES,
    count_cpu_seconds,
    subtract_readings,
)
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_number, write_seconds, write_share
from benchmarks.systems.own.own_stack import OwnStack
from benchmarks.texts import list_distinct_lines
from vectormill.cli.workplace import workplace
from vectormill.client import Client
from vectormill.domain.jobs.job import COMPLETED
from vectormill.files.ndjson import ItemJson

NUM_ITEMS: Final = 100_000
NUM_WARM_UP_ITEMS: Final = 2_000
POLL_SECONDS: Final = 0.5
COST_TARGET: Final = 0.15
# The tokenizer runs in the Celery worker, and so does what writes to Postgres. All that these take is counted, and with
# it what Celery itself takes: the share is never made better than it is.
TOKENIZER_AND_DATABASE: Final = (CELERY_WORKER, POSTGRES)

Json = Mapping[str, Any]


def measure(order: Order) -> Report:
    num_items = order.items or NUM_ITEMS
    order.steps.begin("short_texts", 2 + order.repeat)
    items = list_distinct_lines(num_items)
    with workplace(None) as directory, OwnStack(directory) as stack:
        order.steps.step("starting the stack")
        with Client(stack.wait_until_ready()) as client:
            order.steps.step("warming up")
            run_job(client, items[:NUM_WARM_UP_ITEMS], "warm_up")
            jobs, spent = [], []
            for number in range(order.repeat):
                order.steps.step(f"{num_items:,} texts, job {number + 1} of {order.repeat}")
                before = count_cpu_seconds(stack.pid)
                jobs.append(run_job(client, items, f"lines_{number}"))
                spent.append(subtract_readings(count_cpu_seconds(stack.pid), before))
    return judge_cost(jobs, spent)


def run_job(client: Client, items: Sequence[ItemJson], collection: str) -> Json:
    """The ended job. Raises BenchmarkFailed when it is not complete."""
    job = client.wait(client.submit(items, collection=collection)["id"], poll_seconds=POLL_SECONDS)
    if job["state"] != COMPLETED:
        raise BenchmarkFailed(f"The job ended {job['state']}, with {job['num_failed']:,} items failed.")
    return job


def judge_cost(jobs: Sequence[Json], spent: Sequence[Mapping[str, float]]) -> Report:
    """The report on jobs, and on the processor seconds by name of process that each of them took."""
    cost = Spread.of([find_share(each, TOKENIZER_AND_DATABASE) for each in spent])
    seconds = Spread.of([find_seconds(job) for job in jobs])
    num_items, num_tokens = jobs[-1]["num_items"], jobs[-1]["num_tokens"]
    measures = [
        Measure(
            "processor time of tokenizer and database, of all that the job took",
            cost.describe(write_share),
            f"≤ {COST_TARGET:.0%}",
            cost.median <= COST_TARGET,
        ),
        *(
            Measure(
                f"of it {name}",
                Spread.of([find_share(each, (name,)) for each in spent]).describe(write_share),
            )
            for name in sorted(spent[-1], key=lambda name: -spent[-1][name])
            if spent[-1][name] > 0
        ),
        Measure("from submission to the last commit", seconds.describe(write_seconds)),
        Measure("texts/s", Spread.of([num_items / find_seconds(job) for job in jobs]).describe(write_number)),
        Measure(
            "tokens/s", Spread.of([num_tokens / find_seconds(job) for job in jobs]).describe(write_number)
        ),
        Measure("padding", write_share(max(job["padding_waste"] for job in jobs))),
    ]
    return Report(
        "short_texts",
        f"{num_items:,} different lines of docstrings, {num_tokens:,} tokens, {len(jobs)} jobs.",
        (tabulate(measures), tabulate_stages(jobs)),
        (
            "Processor time is user and system time of the stack's processes from the submission to the end of the "
            "job. The Celery worker holds the tokenizer and what writes to Postgres; all that it takes is counted.",
            "Stages are as the last job reports them. Chunks side by side are counted each, and a stage that waits for "
            "a core counts as being at work: these seconds are longer than the processor time of the first table.",
            f"The job was bounded by: {describe_bound(jobs[-1])}.",
        ),
    )


def describe_bound(job: Json) -> str:
    bound = job.get("bound_by")
    return f"{bound['value']} ({bound['reason'].rstrip('.')})" if bound else "nothing it could name"


def find_share(spent: Mapping[str, float], names: Sequence[str]) -> float:
    """The part of all seconds that these processes took."""
    total = sum(spent.values())
    return sum(spent.get(name, 0.0) for name in names) / total if total else 0.0


def find_seconds(job: Json) -> float:
    """From the submission until the transaction that committed its last vectors, on the database's clock."""
    ended, begun = datetime.fromisoformat(job["finished_at"]), datetime.fromisoformat(job["created_at"])
    return (ended - begun).total_seconds()


def tabulate_stages(jobs: Sequence[Json]) -> Table:
    """One row per stage of the last job, in the order of a text's way."""
    stages: Mapping[str, Mapping[str, float]] = jobs[-1]["stages"]
    rows = [
        (name, write_seconds(stage["seconds"]), write_share(stage["share"])) for name, stage in stages.items()
    ]
    return Table(("stage", "at work", "share, as the job says"), tuple(rows))
