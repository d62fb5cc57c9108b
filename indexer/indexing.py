"""The phase indexing builds and drops indexes as the collection's settings require. Each step is idempotent.

On a live generation, indexes are built and dropped concurrently, so that neither searches nor writers wait.
On a generation that is being built a plain build is faster; it is restarted as a concurrent one if a writer
has to wait.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import sql

from indexer.context import RunContext
from vectormill.collections.codebooks import (
    LEAST_ROWS,
    code_rows,
    find_codebook,
    keep_codebook,
    sample_tokens,
)
from vectormill.collections.collection import AUTO, LIVE, MULTI_VECTOR_CODES, Generation
from vectormill.collections.collections import add_to_report, find_generation, find_generation_by_id
from vectormill.collections.generation_tables import attributes_name
from vectormill.collections.index_plan import (
    IS_INDEXED,
    IS_TOO_LONG,
    SPARSE_CLASS,
    WEIGHTS_BYTES,
    IndexPlan,
    find_operator_class,
)
from vectormill.collections.indexes import (
    IN_USE_SECONDS,
    BuildProgress,
    FoundIndex,
    PlannedIndex,
    analyze_table,
    count_rows,
    count_unindexed,
    drop_index,
    end_former_builds,
    find_index_settings,
    find_indexes,
    find_record,
    name_next_hnsw,
    name_weights_index,
    plan_for,
    run_build,
)
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE, VECTORS
from vectormill.results.representations import OUTPUT_COLUMNS
from vectormill.runs.run import INDEX, INDEXING
from vectormill.search.filter_sql import TEXT_INDEX, define_filter_indexes, name_text_index
from vectormill.vectors.residual_codes import measure_codebook

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 2.0
# How long a writer waits for a plain build before that is replaced by a concurrent one.
PATIENCE_SECONDS: Final = 3.0


class WriterWaits(Exception):
    """A writer is waiting for a lock that the index build holds."""


@dataclass(slots=True)
class PhaseProgress:
    """The progress of the phase, reported at most once per REPORT_SECONDS during a build."""

    context: RunContext
    found: dict[str, Any] = field(default_factory=dict)
    _told_at: float = 0.0

    def tell(self, **found: Any) -> None:
        self.found.update(found)
        self._told_at = time.monotonic()
        self.context.report(INDEXING, self.found)

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        self.tell(**{name: [*self.found.get(name, []), dict(entry)]})

    def is_due(self) -> bool:
        return time.monotonic() - self._told_at >= REPORT_SECONDS

    def tell_build(self, name: str, started_at: float, progress: BuildProgress | None) -> None:
        self.context.check()
        if progress is not None and self.is_due():
            self.tell(
                progress={
                    "index": name,
                    "seconds": round(time.monotonic() - started_at, 1),
                    "share": progress.share,
                    **progress.to_json(),
                }
            )


def index(context: RunContext) -> None:
    """Build and drop indexes of the generation that the run writes, or else of the live one."""
    build_indexes(context, load_generation(context))


def build_indexes(context: RunContext, generation: Generation) -> None:
    """Build indexes that are wanted and missing, and drop those that exist and are not wanted.

    The options of a run of kind `index` may ask for more: `rebuild`, `drop`, m, ef_construction, workers,
    memory_bytes; or for less: `only_codes`. Raise RunCancelled or LeaseLost, as `context.check` does, or psycopg.Error.
    """
    progress = PhaseProgress(context)
    options = context.run.options if context.run.kind == INDEX else {}
    remove_leftovers(context, generation)
    if options.get("drop"):
        drop_vector_indexes(progress, generation, str(options.get("because") or "as requested"))
        return
    code_multi_vectors(progress, generation)
    if options.get("only_codes"):
        return
    build_vector_index(progress, generation, options)
    build_attribute_indexes(progress, generation)
    progress.tell(progress=None)


def remove_leftovers(context: RunContext, generation: Generation) -> None:
    """End index builds whose run has moved to another indexer, and drop their invalid indexes."""
    num_ended = end_former_builds(context.engine, generation.id)
    if num_ended:
        logger.warning("Ended %d index builds whose run has moved to another indexer.", num_ended)
    for index in load_indexes(context, generation):
        if index.is_ours and not index.is_valid:
            logger.warning("Dropping %s, left unfinished by a build that was ended.", index.name)
            drop(context, generation, index.name)


def code_multi_vectors(progress: PhaseProgress, generation: Generation) -> None:
    """Turn multi-vectors into residual codes if the collection wants that, by a codebook that is measured if need be.

    This comes before the vector index, into which each row that changes is inserted again.
    """
    context = progress.context
    with context.engine.begin() as connection:
        wanted = find_index_settings(connection, generation.id).options.get(MULTI_VECTOR_CODES)
        if not wanted or not generation.spec.has_output(MULTI_VECTOR):
            return
        codebook = find_codebook(connection, generation.spec)
        num_rows = count_rows(connection, generation.table_name)
        is_measured = codebook is None and num_rows >= LEAST_ROWS
        sample = sample_tokens(connection, generation, num_rows) if is_measured else None
    if codebook is None:
        if sample is None or not len(sample):
            because = (
                f"{num_rows:,} rows have too few tokens to measure a codebook; {LEAST_ROWS:,} rows suffice."
            )
            progress.tell(codes={"num_rows": 0, "because": because})
            return
        measured = measure_codebook(sample)
        with context.engine.begin() as connection:
            keep_codebook(connection, generation.spec, measured)
            codebook = find_codebook(connection, generation.spec)
        assert codebook is not None
    num_coded = 0
    for num_rows in code_rows(context.engine, generation, codebook):
        context.check()
        num_coded += num_rows
        if progress.is_due():
            progress.tell(codes={"num_rows": num_coded})
    progress.tell(codes={"num_rows": num_coded, "codebook": codebook.digest.hex()})


def build_vector_index(progress: PhaseProgress, generation: Generation, options: Mapping[str, Any]) -> None:
    context = progress.context
    if not (generation.spec.has_output(DENSE) or generation.spec.has_output(SPARSE)):
        what = "Multi-vectors" if generation.kind == VECTORS else generation.kind.capitalize()
        with context.engine.connect() as connection:
            num_rows = count_rows(connection, generation.table_name)
        progress.tell(num_rows=num_rows, because=f"{what} have no vector index.")
        return
    with context.engine.begin() as connection:
        outlook = plan_for(connection, generation, context.settings, options)
    progress.tell(num_rows=outlook.num_rows, plan=(outlook.sparse_plan or outlook.plan).to_json())
    if outlook.sparse_plan is not None:
        build_hnsw_of(progress, generation, SPARSE, outlook.sparse_plan, outlook, options)
    if generation.spec.has_output(DENSE):
        progress.tell(plan=outlook.plan.to_json())
        build_hnsw_of(progress, generation, DENSE, outlook.plan, outlook, options)


def build_hnsw_of(
    progress: PhaseProgress,
    generation: Generation,
    output: str,
    plan: IndexPlan,
    outlook: PlannedIndex,
    options: Mapping[str, Any],
) -> None:
    """Build the HNSW index of an output if it is wanted and missing, and drop the former one, or the unwanted one."""
    context = progress.context
    present = [
        index
        for index in load_indexes(context, generation)
        if index.is_vector_index and (index.operator_class == SPARSE_CLASS) == (output == SPARSE)
    ]
    ours = [index for index in present if index.is_ours]
    if not plan.is_wanted:
        # Under policy `auto`, an existing index is kept even if the collection is now too small for a new
        # one.
        is_possible = output == SPARSE or (
            find_operator_class(outlook.vector_type, generation.spec.dimensions)[0] is not None
        )
        if ours and not (outlook.chosen.policy == AUTO and is_possible):
            drop_vector_indexes(progress, generation, plan.reasons[0])
        return
    serving = [index for index in present if index.is_valid and index.operator_class == plan.operator_class]
    reason = find_reason(serving, plan, outlook, options, context.settings.index_rebuild_share)
    if reason is None:
        progress.tell(kept=[*progress.found.get("kept", []), *(index.name for index in serving)])
        return
    progress.tell(because=reason)
    indexes = load_indexes(context, generation)
    weights = name_weights_index(generation.id)
    if output == SPARSE and weights not in {index.name for index in indexes}:
        # The rows with too many sparse weights for HNSW, of which there are few or none.
        definition = sql.SQL(f"(({WEIGHTS_BYTES})) WHERE {IS_TOO_LONG}")
        build(progress, generation, weights, generation.table_name, definition, {})
    name = name_next_hnsw(generation.id, indexes)
    seconds, notices = build_hnsw(progress, generation, name, plan)
    built: dict[str, Any] = {
        "name": name,
        "m": plan.m,
        "ef_construction": plan.ef_construction,
        "num_rows": outlook.num_rows,
        "num_removed": outlook.num_removed,
        "seconds": seconds,
        "because": reason,
        "reasons": [*plan.reasons, *notices],
    }
    with context.engine.begin() as connection:
        if output == SPARSE:
            built["num_unindexed"] = count_unindexed(connection, generation.table_name)
        record = find_record(connection, generation.id)
        dense = {key: value for key, value in record.items() if key != SPARSE}
        sparse = {SPARSE: record[SPARSE]} if SPARSE in record else {}
        now = {**dense, SPARSE: built} if output == SPARSE else {**built, **sparse}
        add_to_report(connection, generation.id, "index", now)
    for index in ours:
        drop(context, generation, index.name)
        progress.add("dropped", {"name": index.name, "because": f"{name} replaces it"})


def find_reason(
    serving: list[FoundIndex],
    plan: IndexPlan,
    outlook: PlannedIndex,
    options: Mapping[str, Any],
    most_worn: float,
) -> str | None:
    """Return why the vector index must be built now; None if an existing one will do."""
    if not serving:
        return "There is none yet."
    if options.get("rebuild"):
        return str(options.get("because") or "A rebuild was requested.")
    if outlook.changed_share > most_worn:
        return (
            f"{outlook.changed_share:.0%} of its rows were deleted or replaced since it was built "
            "(VECTORMILL_INDEX_REBUILD_SHARE)."
        )
    chosen = outlook.chosen
    wanted = {"m": chosen.m and plan.m, "ef_construction": chosen.ef_construction and plan.ef_construction}
    for index in serving:
        has = {"m": index.options.get("m", 16), "ef_construction": index.options.get("ef_construction", 64)}
        if all(value is None or has[name] == value for name, value in wanted.items()):
            return None
    return "Other options are requested than it was built with."


def build_hnsw(
    progress: PhaseProgress, generation: Generation, name: str, plan: IndexPlan
) -> tuple[float, list[str]]:
    """Build an HNSW index; return the seconds it took, and notices of Postgres.

    If the server lacks shared memory for parallel workers, build again without them.
    """
    assert plan.operator_class is not None
    is_sparse = plan.operator_class == SPARSE_CLASS
    definition = sql.SQL("USING hnsw ({} {}) WITH (m = {}, ef_construction = {}){}").format(
        sql.Identifier(OUTPUT_COLUMNS[SPARSE if is_sparse else DENSE]),
        sql.Identifier(plan.operator_class),
        sql.Literal(plan.m),
        sql.Literal(plan.ef_construction),
        sql.SQL(f" WHERE {IS_INDEXED}" if is_sparse else ""),
    )
    settings = {
        "maintenance_work_mem": f"{plan.memory_bytes // 1024}kB",
        "max_parallel_maintenance_workers": str(plan.workers),
    }
    try:
        return build(progress, generation, name, generation.table_name, definition, settings)
    except psycopg.errors.DiskFull as error:
        if "shared memory" not in str(error) or not plan.workers:
            raise
        remove_leftovers(progress.context, generation)
        reason = f"Built by one process, because the server lacks shared memory for more: {error}".strip()
        progress.tell(notices=[reason])
        serial = {**settings, "max_parallel_maintenance_workers": "0"}
        seconds, notices = build(progress, generation, name, generation.table_name, definition, serial)
        return seconds, [reason, *notices]


def build(
    progress: PhaseProgress,
    generation: Generation,
    name: str,
    table: str,
    definition: sql.Composable,
    settings: Mapping[str, str],
) -> tuple[float, list[str]]:
    """Build an index; return the seconds it took, and notices of Postgres.

    The build is concurrent if the generation is live or, on a second try, if a plain build keeps writers
    waiting.
    """
    context, started_at = progress.context, time.monotonic()

    def attempt(*, is_concurrent: bool) -> list[str]:
        begun_at = time.monotonic()
        waiting_since: float | None = None

        def watch(now: BuildProgress | None) -> None:
            nonlocal waiting_since
            progress.tell_build(name, begun_at, now)
            is_in_the_way = not is_concurrent and now is not None and now.num_waiting > 0
            waiting_since = (waiting_since or time.monotonic()) if is_in_the_way else None
            if waiting_since is not None and time.monotonic() - waiting_since >= PATIENCE_SECONDS:
                raise WriterWaits

        create = "CREATE INDEX CONCURRENTLY {} ON {} {}" if is_concurrent else "CREATE INDEX {} ON {} {}"
        place = sql.Identifier("vectormill", table)
        statement = sql.SQL(create).format(sql.Identifier(name), place, definition)
        return run_build(context.engine, generation.id, statement, settings, watch)

    try:
        try:
            notices = attempt(is_concurrent=generation.state == LIVE)
        except WriterWaits:
            told = "Writers were waiting: the build continues concurrently."
            progress.add("notices", {"index": name, "notice": told})
            notices = attempt(is_concurrent=True)
    except BaseException:
        _leave_nothing(context, generation)
        raise
    seconds = round(time.monotonic() - started_at, 2)
    (made,) = [index for index in load_indexes(context, generation) if index.name == name]
    progress.add("built", {"name": name, "seconds": seconds, "num_bytes": made.num_bytes})
    if notices:
        progress.tell(notices=[*progress.found.get("notices", []), *notices])
    logger.info("Built %s in %.1f s.", name, seconds)
    return seconds, notices


def _leave_nothing(context: RunContext, generation: Generation) -> None:
    """Drop invalid indexes left by a failed or cancelled build. The next attempt drops those that remain."""
    try:
        for index in load_indexes(context, generation):
            if index.is_ours and not index.is_valid:
                drop_index(context.engine, generation.id, index.name, is_live=True, watch=lambda: None)
    except Exception as error:  # noqa: BLE001 - the error that ended the build matters more
        logger.warning("An unfinished index is left for the next attempt: %s", error)


def drop_vector_indexes(progress: PhaseProgress, generation: Generation, because: str) -> None:
    """Drop the vector indexes that Vectormill built; those made by hand stay."""
    context = progress.context
    for index in load_indexes(context, generation):
        if index.is_ours and (index.is_vector_index or index.name == name_weights_index(generation.id)):
            drop(context, generation, index.name)
            progress.add("dropped", {"name": index.name, "because": because})
    with context.engine.begin() as connection:
        add_to_report(connection, generation.id, "index", None)


def drop_before_bulk(context: RunContext, num_changes: int) -> str | None:
    """Drop the vector index before so many changes that rebuilding it is cheaper.

    Return the reason, None if the index stays. On a live generation this is done only under policy `auto` and
    if no search uses the index, because without it searches read every row. `build_indexes` builds it again.
    If the run ends before that, the scheduler's index maintainer starts a build.
    """
    if not num_changes:
        return None
    generation = load_generation(context)
    with context.engine.begin() as connection:
        kept = find_index_settings(connection, generation.id)
        num_rows = count_rows(connection, generation.table_name)
        indexes = find_indexes(connection, generation.id)
    present = [index for index in indexes if index.is_vector_index and index.is_ours]
    if not present or num_changes <= context.settings.index_bulk_share * max(num_rows, 1):
        return None
    because = (
        f"{num_changes:,} changes to {num_rows:,} rows are more than {context.settings.index_bulk_share:.0%} "
        "(VECTORMILL_INDEX_BULK_SHARE): without the index they are written several times as fast."
    )
    progress = PhaseProgress(context)
    is_busy = any(
        index.table == generation.table_name
        and index.idle_seconds is not None
        and index.idle_seconds < IN_USE_SECONDS
        for index in indexes
    )
    if generation.state == LIVE and (kept.policy != AUTO or is_busy):
        why = "searches use it" if is_busy else f"the policy is {kept.policy}"
        progress.tell(kept_for_searches=f"{because} But the index is kept, because {why}.")
        return None
    drop_vector_indexes(progress, generation, because)
    return because


def build_attribute_indexes(progress: PhaseProgress, generation: Generation) -> None:
    """Build the indexes for metadata filters and for full-text search of stored texts."""
    context, table = progress.context, attributes_name(generation.id)
    with context.engine.begin() as connection:
        kept = find_index_settings(connection, generation.id)
    wanted = define_filter_indexes(generation.id, kept.filters)
    if kept.keep_text and generation.kind == VECTORS:  # only vectors are searched by text
        wanted[name_text_index(generation.id)] = TEXT_INDEX
        if kept.options.get("bm25"):
            using = sql.SQL("USING bm25 (text) WITH (text_config = {})").format(f"pg_catalog.{kept.language}")
            wanted[f"{name_text_index(generation.id)}_{kept.language}"] = using
    indexes = load_indexes(context, generation)
    present = {index.name for index in indexes if index.table == table and index.is_ours}
    for name in sorted(present - wanted.keys()):
        drop(context, generation, name)
        progress.add("dropped", {"name": name, "because": "no filter uses it any more"})
    missing = [name for name in wanted if name not in present]
    for name in missing:
        build(progress, generation, name, table, wanted[name], {})
    if missing:
        # Postgres collects statistics of an indexed expression only once the index exists.
        with context.engine.begin() as connection:
            analyze_table(connection, table)


def drop(context: RunContext, generation: Generation, name: str) -> None:
    drop_index(context.engine, generation.id, name, is_live=generation.state == LIVE, watch=context.check)


def load_generation(context: RunContext) -> Generation:
    run = context.run
    with context.engine.connect() as connection:
        found = None if run.generation_id is None else find_generation_by_id(connection, run.generation_id)
        return found or find_generation(connection, run.collection)


def load_indexes(context: RunContext, generation: Generation) -> list[FoundIndex]:
    with context.engine.connect() as connection:
        return find_indexes(connection, generation.id)
