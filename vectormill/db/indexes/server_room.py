"""What the Postgres server has for building an index, asked of the server: it may be on another machine."""

import re
from typing import Final

from sqlalchemy import Connection, text

from vectormill.domain.index_plan import ServerRoom

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
