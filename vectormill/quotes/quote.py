"""Quote: compute from a sample what a job will take, with the speed of live workers in jobs of different lengths."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_in_state
from vectormill.collections.index_plan import SHAPES, estimate_graph_bytes, find_operator_class
from vectormill.collections.sizing import estimate_row_bytes
from vectormill.domain.encoding import FAIL, IN_WINDOWS, LATE, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EmptyJob
from vectormill.domain.schema import PromptEstimate
from vectormill.domain.task import DENSE, SCORE, VECTOR
from vectormill.domain.vector_type import VectorType
from vectormill.jobs.bottleneck import DEVICE, HELD, RUN
from vectormill.jobs.chunk import USUAL_SPECIAL_TOKENS, estimate_tokens
from vectormill.jobs.item import split_pair
from vectormill.jobs.job import DISPATCHED_JOB_STATES, NewJob
from vectormill.jobs.operations import QuoteBody
from vectormill.models.model_card import ModelCard
from vectormill.models.prompt_room import open_tokenizer
from vectormill.moments import format_moment
from vectormill.quotes.estimate import DEVIATIONS, Estimate
from vectormill.quotes.sample import KEPT_BYTES, SampledRow, TextSample
from vectormill.workers.workers import Worker, list_workers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# At most this number of bytes of the sampled texts is tokenized, which takes a few seconds of one core.
MOST_BYTES: Final = 4 << 20
# A text that will be cut is tokenized up to so many bytes for each token that the model reads of it.
BYTES_PER_TOKEN: Final = 32


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens [n] that a model reads of some texts, and which [n] of these texts have more than it reads at once.

    `num_estimated` [n] are those of them that follow from the number of bytes. `is_exact` says whether the model's
    tokenizer counted the others; without it all are estimated.
    """

    num_tokens: npt.NDArray[np.int64]
    num_estimated: npt.NDArray[np.int64]
    is_long: npt.NDArray[np.bool_]
    is_exact: bool


def count_tokens(card: ModelCard, spec: EncodingSpec, rows: Sequence[SampledRow]) -> TokenCounts:
    """Count the tokens of random rows, as many as MOST_BYTES allows and at least one.

    Of a text that is longer than what is tokenized of it, the other tokens are as many as its bytes let expect.
    Prompts and special tokens are included, the words of a reranker's template are not.
    """
    texts, times = _take(spec, rows)
    if spec.extract_schema:
        prompts = PromptEstimate(json.loads(spec.extract_schema), estimate_tokens)
        lengths = (times * [estimate_tokens(text) for text in texts]).astype(np.int64)
        counted = np.array([prompts.of(length) for length in lengths.tolist()], dtype=np.int64)
        return TokenCounts(counted, counted, np.zeros(len(texts), dtype=np.bool_), is_exact=False)
    tokenizer = open_tokenizer(card.path / "tokenizer.json")
    is_exact = tokenizer is not None
    if tokenizer is not None:
        counted, num_around = _tokenize(tokenizer, spec.prompt, texts, lowercase=card.lowercase)
    else:
        num_around = estimate_tokens(spec.prompt.encode()) + USUAL_SPECIAL_TOKENS
        counted = np.array([estimate_tokens(text) + num_around for text in texts], dtype=np.int64)
    lengths = num_around + ((counted - num_around) * times).astype(np.int64)
    read = _find_read(spec, lengths, num_around)
    estimated = np.abs(read - _find_read(spec, counted, num_around)) if is_exact else read
    return TokenCounts(read, estimated, lengths > spec.max_tokens, is_exact)


def _find_read(spec: EncodingSpec, lengths: npt.NDArray[np.int64], num_around: int) -> npt.NDArray[np.int64]:
    """Return the tokens [n] that a model reads of texts with so many [n], of which `num_around` are around each."""
    is_long = lengths > spec.max_tokens
    if spec.long_texts == FAIL:
        return np.where(is_long, 0, lengths)
    if spec.long_texts in IN_WINDOWS:
        room = max(1, spec.max_tokens - num_around)
        stride = max(1, room - spec.passage_overlap)
        windows = -(-(lengths - num_around - room) // stride) + 1
        return np.where(is_long, windows * spec.max_tokens, lengths)
    return np.minimum(lengths, spec.max_tokens)


def _take(spec: EncodingSpec, rows: Sequence[SampledRow]) -> tuple[list[bytes], npt.NDArray[np.float64]]:
    """Return what is tokenized of random rows, and how many times [n] as long each of their texts is."""
    limit = BYTES_PER_TOKEN * spec.max_tokens if spec.long_texts == TRUNCATE else KEPT_BYTES
    texts: list[bytes] = []
    times: list[float] = []
    num_left = MOST_BYTES
    for place in np.random.default_rng(0).permutation(len(rows)):
        if num_left <= 0:
            break
        # Only the passage of such a pair is counted, since all passages of a text are about as long as it.
        passage, whole = split_pair(rows[place].text) if spec.long_texts == LATE else (rows[place].text, None)
        texts.append(passage[:limit])
        times.append(1.0 if whole is not None else rows[place].num_bytes / max(1, len(texts[-1])))
        num_left -= len(texts[-1])
    return texts, np.array(times)


def _tokenize(
    tokenizer: "Tokenizer", prompt: str, texts: Sequence[bytes], *, lowercase: bool
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the tokens [n] of each text with what the model puts around it, and how many those are."""
    given: list[str | tuple[str, str]] = []
    for each in texts:
        first, second = (
            None if side is None else side.decode("utf-8", "replace") for side in split_pair(each)
        )
        first = f"{prompt}{first}"
        first, second = (side.lower() if side and lowercase else side for side in (first, second))
        given.append(first or "" if second is None else (first or "", second))
    lengths = [len(encoding) for encoding in tokenizer.encode_batch_fast(given)]
    return np.array(lengths, dtype=np.int64), len(tokenizer.encode(prompt))


# Seconds of one core for a row of 384 dimensions in an HNSW graph in memory, divided by m × ef_construction: 1.7 µs for
# the first 20,000 rows of 16 × 64 (docs/INDEXES.md), 1.3 µs for 200,000 of 16 × 128, 1.6 µs for the first 100,000 and
# 2.0 µs for five million of 8 × 32 (benchmarks/README.md, "Millions of rows").
BUILD_SECONDS: Final = Estimate.between(1.1e-6, 2.4e-6)
# Bytes of a token in UTF-8, and how much of them Postgres keeps of a job's texts after compression.
TEXT_BYTES_PER_TOKEN: Final = 4.5
KEPT_SHARE: Final = Estimate(0.5, 0.25, 0.75)
# Rows of real tables were within this share of what was computed, and those of attributes too.
ROW_SHARE: Final = 0.1
ATTRIBUTE_BYTES: Final = 190
# Pages that are not full: the last of the table, and the first ones of the index of keys.
PAGES_BYTES: Final = Estimate(12 << 10, 0, 40 << 10)
# Seconds of the host's cores for a text and for each of its tokens: 35 µs for 16 tokens, 74 for 100 and 155 for 256 in
# a worker, and 25 to 55 µs in the other processes (docs/SIZING.md, "Host"); 115 µs in all, for 17 tokens, with five
# million rows in one collection (benchmarks/README.md, "Millions of rows").
HOST_TEXT_SECONDS: Final = Estimate.between(53e-6, 115e-6)
HOST_TOKEN_SECONDS: Final = 0.5e-6
# From the submission to the first batch and from the last to the end of the job.
AROUND_SECONDS: Final = Estimate(0.7, 0.2, 2.5)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload is the texts that are to be encoded and the rows that are to be kept.

    `tokens_per_row` counts what the model reads of a row, and `encoded` is the share of all tokens that are encoded:
    the others are in texts that are known. The bytes are those of a row on average. Scores and records have no index.
    `graph` is m and ef_construction of the index; None: as Vectormill chooses.
    """

    rows: Estimate
    tokens_per_row: Estimate
    vector_type: VectorType
    dimensions: int
    text_bytes: float
    encoded: Estimate = Estimate.exact(1)  # noqa: RUF009 - frozen
    key_bytes: float = 16
    metadata_bytes: float = 0
    has_vectors: bool = True
    graph: tuple[int, int] | None = None


def estimate_sizes(load: Workload, rate: Estimate | None, cores: int) -> dict[str, Any]:
    """Return the figures of a load by name; those of time are None without a rate, in tokens per second.

    `cores` are those of the Postgres server that builds the index. `index_reason` says why there is none.
    """
    operator_class, reason = find_operator_class(load.vector_type, load.dimensions)
    if not (load.has_vectors and load.dimensions):
        operator_class, reason = None, "Only dense vectors have an index that can be computed before."
    has_index = operator_class is not None
    m, ef_construction = load.graph or max(shape for shape in SHAPES if shape[0] <= load.rows.value)[1:]
    build_seconds = BUILD_SECONDS * (m * ef_construction * load.dimensions / 384 / cores)
    graph_bytes = estimate_graph_bytes(1, load.vector_type.content_bytes(load.dimensions), m)
    row_bytes = estimate_row_bytes(load.vector_type.content_bytes(load.dimensions), round(load.key_bytes))
    if load.metadata_bytes:
        row_bytes += round(ATTRIBUTE_BYTES + load.metadata_bytes)
    tokens = load.rows * load.tokens_per_row * load.encoded
    return {
        "tokens": tokens,
        **estimate_time(tokens, load.tokens_per_row, rate),
        "rows_bytes": load.rows * Estimate.around(row_bytes, ROW_SHARE) + PAGES_BYTES,
        "texts_bytes": load.rows * load.text_bytes * KEPT_SHARE,
        "index_bytes": load.rows * graph_bytes if has_index else None,
        "index_seconds": load.rows * build_seconds if has_index else None,
        "index_reason": "" if has_index else reason,
    }


def estimate_time(
    tokens: Estimate, tokens_per_row: Estimate, rate: Estimate | None
) -> dict[str, Estimate | None]:
    """Return the seconds of a job without others, and the cores that tokenize and commit; None without a rate."""
    if rate is None:
        return {"seconds": None, "host_cores": None}
    tokens_per_row = tokens_per_row.at_least(1)  # a text that fails has none
    host_seconds = HOST_TEXT_SECONDS + tokens_per_row * HOST_TOKEN_SECONDS
    return {
        "seconds": tokens / rate + AROUND_SECONDS,
        "host_cores": host_seconds * rate / tokens_per_row,
    }


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

    def find_rate(self, tokens_per_text: float) -> Estimate:
        """Return the tokens per second of texts of this length, which is at least one token."""
        tokens_per_text = max(1.0, tokens_per_text)
        rate = tokens_per_text / self.find_seconds(1, tokens_per_text)
        return Estimate(rate, rate / self.factor, rate * self.factor)


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
        sample.num_all, find_mean(counts, is_whole=is_whole), spec.kept_type, spec.dimensions,
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
        "truncated": Estimate.of_share(int(counts.is_long.sum()), len(counts.is_long), is_whole=is_whole),
        "repeated": sample.repeated,
        "kept": kept,
        "tokens_per_second": rate,
        "queue_seconds": queue,
        "ends_at": ends_at,
        **sizes,
        "notes": notes,
    }
    return cast(QuoteBody, msgspec.to_builtins(figures))


def find_mean(counts: TokenCounts, *, is_whole: bool) -> Estimate:
    """Return the mean tokens of a row, with the interval of 95 % if only some rows were counted.

    What was not counted but follows from bytes widens it.
    """
    number, mean = len(counts.num_tokens), float(counts.num_tokens.mean()) if len(counts.num_tokens) else 0.0
    spread = 0.0
    if not is_whole and number > 1:
        spread = DEVIATIONS * float(counts.num_tokens.std(ddof=1)) / math.sqrt(number)
    if number:
        spread += ESTIMATE_SHARE * float(counts.num_estimated.mean())
    return Estimate(mean, max(0.0, mean - spread), mean + spread)


def find_kept(connection: Connection, generation: Generation, sample: TextSample) -> Estimate:
    """Return the share of rows that a generation has with the same key and text."""
    statement = text(COUNT_KEPT.format(table=generation.table_name))
    values = {
        "keys": [row.key for row in sample.drawn],
        "hashes": [row.content_hash for row in sample.drawn],
    }
    num_kept: int = connection.execute(statement, values).scalar_one()
    return Estimate.of_share(num_kept, len(sample.drawn), is_whole=sample.is_whole)


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
    ahead: Sequence[tuple[int, int, float | None]], priority: int, own: Estimate, speed: Speed
) -> Estimate:
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
    return Estimate(before + turns, before / speed.factor, (before + sum(beside)) * speed.factor)
