"""Plans of vector indexes: made from a generation's rows, its collection's wishes and the server's room."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.indexes.index_plan import IndexPlan, IndexWishes, ServerRoom, plan_index
from vectormill.collections.indexes.indexes import (
    KeptWishes,
    count_removed,
    count_rows,
    find_record,
    find_wishes,
    share_removed,
)
from vectormill.settings import Settings
from vectormill.vectors.vector_types import choose_vector_type

# Options of a run of kind `index` beside what the collection keeps, for this one build.
SHAPE_OPTIONS: Final = ("m", "ef_construction", "workers", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan, and what it was made of. `worn` is the share of rows deleted or replaced since the last build."""

    kept: KeptWishes
    wishes: IndexWishes
    plan: IndexPlan
    vector_type: str
    num_rows: int
    num_removed: int
    worn: float
    record: Mapping[str, Any]


def plan_for(
    connection: Connection, generation: Generation, settings: Settings, options: Mapping[str, Any]
) -> Outlook:
    """`options` may name SHAPE_OPTIONS. Raises InvalidOption for values that pgvector refuses."""
    kept = find_wishes(connection, generation.id)
    asked = {name: options[name] for name in SHAPE_OPTIONS if options.get(name) is not None}
    wishes = IndexWishes.from_options(kept.policy, {**kept.options, **asked})
    vector_type = choose_vector_type(generation.spec, in_collection=True).name
    num_rows = count_rows(connection, generation.table_name)
    num_removed = count_removed(connection, generation.table_name)
    record = find_record(connection, generation.id)
    plan = plan_index(
        num_rows,
        generation.spec.dimensions,
        vector_type,
        wishes,
        read_server_room(connection),
        kind=generation.kind,
        is_live=generation.state == LIVE,
        least_rows=settings.index_rows,
        memory_share=settings.index_memory_share,
    )
    worn = share_removed(record, num_removed)
    return Outlook(kept, wishes, plan, vector_type, num_rows, num_removed, worn, record)


READ_SETTINGS: Final = text("""
    SELECT pg_size_bytes(current_setting('maintenance_work_mem')) AS maintenance_bytes,
           pg_size_bytes(current_setting('effective_cache_size')) AS cache_bytes,
           CAST(current_setting('max_parallel_maintenance_workers') AS integer) AS num_workers,
           least(CAST(current_setting('max_parallel_workers') AS integer),
                 CAST(current_setting('max_worker_processes') AS integer)) AS most_workers,
           pg_has_role(current_user, 'pg_read_server_files', 'MEMBER')
               AND has_function_privilege('pg_read_file(text, bigint, bigint, boolean)', 'EXECUTE') AS can_read
""")

# Files of Linux, and of the control group of a container; NULL where there is none.
READ_MACHINE: Final = text("""
    SELECT pg_read_file('/proc/meminfo', 0, 65536, true) AS memory,
           pg_read_file('/proc/stat', 0, 65536, true) AS processors,
           pg_read_file('/sys/fs/cgroup/memory.max', 0, 100, true) AS most_memory,
           pg_read_file('/sys/fs/cgroup/memory.current', 0, 100, true) AS used_memory,
           pg_read_file('/sys/fs/cgroup/memory.stat', 0, 65536, true) AS memory_use,
           pg_read_file('/sys/fs/cgroup/cpu.max', 0, 100, true) AS quota
""")


def read_server_room(connection: Connection) -> ServerRoom:
    """Free memory and cores of the server where our role may read its files, else what its settings hint at."""
    settings = connection.execute(READ_SETTINGS).one()
    free_bytes, source, num_cores = settings.cache_bytes, "the server's effective_cache_size", None
    if settings.can_read:
        machine = connection.execute(READ_MACHINE).one()
        files = {name: value or "" for name, value in machine._mapping.items()}
        num_cores = count_cores(files["processors"], files["quota"])
        found = find_free_bytes(
            files["memory"], files["most_memory"], files["used_memory"], files["memory_use"]
        )
        if found is not None:
            free_bytes, source = found, "free on the server"
    return ServerRoom(
        free_bytes,
        source,
        num_cores,
        settings.maintenance_bytes,
        settings.num_workers,
        settings.most_workers,
    )


def find_free_bytes(meminfo: str, most: str, used: str, use: str) -> int | None:
    """Bytes that a process may still take, by /proc/meminfo and by its control group; None when neither tells.

    What a group has of cached files is given back before it runs out of memory.
    """
    available = re.search(r"^MemAvailable: +(\d+) kB", meminfo, re.MULTILINE)
    free = [int(available[1]) * 1024] if available else []
    if most.strip().isdigit() and used.strip().isdigit():
        cached = re.search(r"^inactive_file (\d+)", use, re.MULTILINE)
        free.append(max(0, int(most) - int(used) + (int(cached[1]) if cached else 0)))
    return min(free, default=None)


def count_cores(stat: str, quota: str) -> int | None:
    """Processors by /proc/stat, or so many as the control group's quota of time amounts to; None when neither tells."""
    num = len(re.findall(r"^cpu\d+ ", stat, re.MULTILINE))
    limit = re.fullmatch(r"(\d+) (\d+)", quota.strip())
    if limit:
        num = min(num or 1 << 10, max(1, int(limit[1]) // int(limit[2])))
    return num or None
