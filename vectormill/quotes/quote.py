"""Quote: compute from a sample what a job will take, with the speed of live workers in jobs of different lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, cast

import msgspec
import numpy as np
from sqlalchemy import Connection, text

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.generations import find_in_state
from vectormill.domain.encoding import FLOAT16
from vectormill.domain.errors import EmptyJob
from vectormill.domain.task import DENSE, SCORE, VECTOR
from vectormill.jobs.bottleneck import DEVICE, HELD, RUN
from vectormill.jobs.job import DISPATCHED_JOB_STATES, NewJob
from vectormill.jobs.operations import QuoteBody
from vectormill.models.model_card import ModelCard
from vectormill.moments import format_moment
from vectormill.quotes.figure import DEVIATIONS, Figure
from vectormill.quotes.sample import TextSample
from vectormill.quotes.sizes import Workload, estimate_sizes
from vectormill.quotes.token_counts import TokenCounts, count_tokens
from vectormill.workers.workers import Worker, list_workers

# Texts and tokens that were encoded, and the seconds in which workers held chunks for them, added up over workers.
Measured = tuple[float, float, float]

# Shorter measurements are mostly of waiting.
LEAST_SECONDS: Final = 1.0
# A job takes at most so many times what was fitted, or as many as this share of the measured jobs did; few jobs say
# less. The rest stood still for reasons of their own, and one of them in a long time must not make a quote useless.
LEAST_FACTOR: Final = 1.25
LIKELY_SHARE: Final = 0.9
# Jobs that differ more from what was fitted tell less than the arithmetic of the model and the devices.
MOST_FACTOR: Final = 10.0
NUM_FEW: Final = 5
FEW_POWER: Final = 1.6


@dataclass(frozen=True, slots=True)
class Speed:
    """The seconds of one worker for a text and for each of its tokens, and the number of workers.

    The time of a job is expected between the `factor`-th part of what they say and `factor` times as much.
    """

    text_seconds: float
    token_seconds: float
    num_workers: int
    factor: float

    def find_seconds(self, num_texts: float, num_tokens: float) -> float:
        """Return the seconds that all workers together need."""
        return (num_texts * self.text_seconds + num_tokens * self.token_seconds) / self.num_workers

    def find_rate(self, tokens_per_text: float) -> Figure:
        """Return the tokens per second of texts of this length, which is at least one token."""
        tokens_per_text = max(1.0, tokens_per_text)
        rate = tokens_per_text / self.find_seconds(1, tokens_per_text)
        return Figure(rate, rate / self.factor, rate * self.factor)


def fit_speed(measured: Sequence[Measured], num_workers: int) -> Speed | None:
    """Fit the costs of a text and of a token by least squares of the relative errors; None without a measurement.

    Measurements whose seconds for a token are far from the median's are not fitted, but count for the interval.
    """
    rows = np.array(
        [each for each in measured if each[2] >= LEAST_SECONDS and min(each) > 0], dtype=np.float64
    )
    if not len(rows):
        return None
    # [n, 2]: times the costs it is 1 for a job that took as long as fitted
    all_shares = rows[:, :2] / rows[:, 2:]
    speeds = np.log(all_shares[:, 1])
    is_near = np.abs(speeds - np.quantile(speeds, 0.5, method="nearest")) <= math.log(MOST_FACTOR)
    shares = all_shares[is_near]
    costs = np.linalg.lstsq(shares, np.ones(len(shares)))[0]
    if len(shares) == 1 or costs.min() < 0:  # lengths that hardly differ, or chance: one of the costs is 0
        alone = shares.sum(axis=0) / (shares**2).sum(axis=0)
        errors = ((shares * alone - 1) ** 2).sum(axis=0)
        use = 1 if len(shares) == 1 else int(errors.argmin())
        costs = np.where(np.arange(2) == use, alone, 0.0)
    likely = float(np.quantile(np.abs(np.log(all_shares @ costs)), LIKELY_SHARE, method="higher"))
    factor = max(LEAST_FACTOR, math.exp(likely)) ** (FEW_POWER if len(rows) < NUM_FEW else 1)
    return Speed(float(costs[0]), float(costs[1]), num_workers, factor)


# An estimate from bytes instead of the model's tokenizer is off by up to this share.
ESTIMATE_SHARE: Final = 0.3
BUILD_CORES: Final = 4

COUNT_KEPT: Final = """
    SELECT count(*)
      FROM unnest(CAST(:keys AS text[]), CAST(:hashes AS bytea[])) AS item (key, content_hash)
      JOIN vectormill.{table} AS live ON live.key = item.key AND live.content_hash = item.content_hash
"""

# Reused texts are left out, because they took no time. While a worker held chunks of several jobs, its time belongs to
# each of them by its share of what the device computed. Only the last thousand submitted jobs are searched.
LIST_MEASURED: Final = text(f"""
    SELECT num_done - num_reused AS texts, num_tokens * (1 - num_reused::float8 / num_done) AS tokens,
           held * least(1, (stage_seconds ->> '{RUN}')::float8 / nullif((stage_seconds ->> '{DEVICE}')::float8, 0))
               AS held
      FROM (SELECT * FROM vectormill.jobs ORDER BY seq DESC LIMIT 1000) AS last
     CROSS JOIN LATERAL (SELECT (stage_seconds ->> '{HELD}')::float8 AS held) AS known
     WHERE model = :model AND started_at >= CAST(:since AS timestamptz) AND num_done > num_reused AND held > 0
     ORDER BY seq DESC LIMIT 20
""")

# The tokens of a job that has not begun are those of its first chunks, by their estimates.
LIST_AHEAD: Final = text(f"""
    SELECT jobs.priority, jobs.num_items - jobs.num_done - jobs.num_failed AS num_items,
           CASE WHEN jobs.num_done > 0 THEN jobs.num_tokens::float8 / jobs.num_done ELSE first.tokens END AS tokens
      FROM vectormill.jobs
     CROSS JOIN LATERAL (
           SELECT sum(estimated_tokens)::float8 / sum(num_items) AS tokens
             FROM (SELECT estimated_tokens, num_items FROM vectormill.chunks
                    WHERE job_id = jobs.id ORDER BY seq LIMIT 100) AS chunk) AS first
     WHERE jobs.model = :model AND jobs.priority <= :priority AND jobs.state IN {DISPATCHED_JOB_STATES}
     ORDER BY jobs.priority, jobs.seq LIMIT 1000
""")


def make_quote(
    connection: Connection, card: ModelCard, job: NewJob, sample: TextSample, *, skips_kept: bool = False
) -> QuoteBody:
    """Return the quote of a job whose rows were sampled; with `skips_kept` rows that exist are not encoded.

    Raise EmptyJob if there are no rows.
    """
    if not sample.num_rows:
        raise EmptyJob
    spec, counts = job.spec, count_tokens(card, job.spec, sample.drawn)
    kept = None
    if job.collection is not None:
        generation = find_in_state(connection, job.collection, LIVE)
        if generation is not None and generation.spec.builds_as(spec.adopt(generation.spec)):
            kept = find_kept(connection, generation, sample)
    encoded = sample.repeated.rest * (kept.rest if kept and skips_kept else 1)
    key_bytes, text_bytes, metadata_bytes = sample.mean_bytes
    is_whole = sample.is_whole and len(counts.num_tokens) == len(sample.drawn)
    load = Workload(
        sample.num_all, find_mean(counts, is_whole=is_whole), spec.vector_type or FLOAT16, spec.dimensions,
        text_bytes, encoded, key_bytes, metadata_bytes, spec.has_output(DENSE),
    )  # fmt: skip
    workers = [each for each in list_workers(connection) if each.model == spec.model and each.slots]
    speed = fit_speed(list_measured(connection, workers), len(workers)) if workers else None
    how = f"No live worker has measured its rate with {spec.model} yet."
    rate = None
    if speed is not None and speed.factor > MOST_FACTOR:
        how = f"What texts took the live workers differs more than {MOST_FACTOR:g}-fold, so it tells no rate."
        speed = None
    if speed is not None:
        how = f"The rate follows from what texts and tokens took the live workers, of which there are {len(workers)}."
        rate = speed.find_rate(load.tokens_per_row.value)
    sizes = estimate_sizes(load, rate, BUILD_CORES)
    queue = ends_at = None
    if speed is not None:
        ahead = connection.execute(LIST_AHEAD, {"model": spec.model, "priority": job.priority}).all()
        queue = find_queue([tuple(row) for row in ahead], job.priority, sizes["seconds"], speed)
        whole, now = sizes["seconds"] + queue, datetime.now(UTC)
        ends_at = [
            format_moment(now + timedelta(seconds=each)) for each in (whole.value, whole.least, whole.most)
        ]
    notes = [*sample.notes, how]
    if not counts.is_exact:
        notes.append(
            "Tokens are estimated from bytes, because this task or model has no tokenizer to count them with."
        )
    if spec.result not in (VECTOR, SCORE):
        notes.append(
            "The disk is that of dense vectors, keys and metadata; records and other outputs come on top."
        )
    figures = {
        "model": spec.model,
        "rows": sample.num_all,
        "num_sampled": len(counts.num_tokens),
        "tokens_per_row": load.tokens_per_row,
        "truncated": Figure.of_share(int(counts.is_long.sum()), len(counts.is_long), is_whole=is_whole),
        "repeated": sample.repeated,
        "kept": kept,
        "tokens_per_second": rate,
        "queue_seconds": queue,
        "ends_at": ends_at,
        **sizes,
        "notes": notes,
    }
    return cast(QuoteBody, msgspec.to_builtins(figures))


def find_mean(counts: TokenCounts, *, is_whole: bool) -> Figure:
    """Return the mean tokens of a row, with the interval of 95 % if only some rows were counted.

    What was not counted but follows from bytes widens it.
    """
    number, mean = len(counts.num_tokens), float(counts.num_tokens.mean()) if len(counts.num_tokens) else 0.0
    spread = 0.0
    if not is_whole and number > 1:
        spread = DEVIATIONS * float(counts.num_tokens.std(ddof=1)) / math.sqrt(number)
    if number:
        spread += ESTIMATE_SHARE * float(counts.num_estimated.mean())
    return Figure(mean, max(0.0, mean - spread), mean + spread)


def find_kept(connection: Connection, generation: Generation, sample: TextSample) -> Figure:
    """Return the share of rows that a generation has with the same key and text."""
    statement = text(COUNT_KEPT.format(table=generation.table_name))
    values = {
        "keys": [row.key for row in sample.drawn],
        "hashes": [row.content_hash for row in sample.drawn],
    }
    num_kept: int = connection.execute(statement, values).scalar_one()
    return Figure.of_share(num_kept, len(sample.drawn), is_whole=sample.is_whole)


def list_measured(connection: Connection, workers: Sequence[Worker]) -> list[Measured]:
    """List what these workers, all of one model, have encoded: each since its start, and their last jobs."""
    measured = []
    for worker in workers:
        numbers = (worker.report.get(name) or 0 for name in ("num_sequences", "num_tokens"))
        measured.append((*numbers, (worker.report.get("stage_seconds") or {}).get(HELD, 0.0)))
    values = {"model": workers[0].model, "since": min(each.started_at for each in workers)}
    rows = connection.execute(LIST_MEASURED, values).all()
    return [*measured, *((row.texts, row.tokens, row.held) for row in rows)]


def find_queue(
    ahead: Sequence[tuple[int, int, float | None]], priority: int, own: Figure, speed: Speed
) -> Figure:
    """Return the seconds that open jobs, as (priority, items, tokens of an item), take before a new one ends.

    More urgent jobs come first. Jobs of the same priority take turns with it, so each of them takes at most as much
    before its end as it takes itself, `own`.
    """
    seconds = [
        (urgency, speed.find_seconds(number, number * tokens)) for urgency, number, tokens in ahead if tokens
    ]
    before = sum(each for urgency, each in seconds if urgency < priority)
    beside = [each for urgency, each in seconds if urgency == priority]
    turns = sum(min(own.value, each) for each in beside)
    return Figure(before + turns, before / speed.factor, (before + sum(beside)) * speed.factor)
