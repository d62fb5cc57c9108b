from vectormill.collections.indexes import count_cores, find_free_bytes

MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   16000000 kB\n"
STAT = "cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\ncpu2 1 2 3\ncpu3 1 2 3\nintr 12 0\n"
GIB = 1 << 30


def test_free_memory_is_what_the_machine_and_the_container_both_have() -> None:
    cases: list[tuple[str, str, str, str, int | None]] = [
        (MEMINFO, "max\n", "123\n", "", 16_000_000 * 1024),
        (MEMINFO, f"{4 * GIB}\n", f"{GIB}\n", "", 3 * GIB),
        (
            MEMINFO,
            f"{4 * GIB}\n",
            f"{3 * GIB}\n",
            f"anon 5\ninactive_file {2 * GIB}\n",
            3 * GIB,
        ),  # cached files
        (MEMINFO, f"{GIB}\n", f"{2 * GIB}\n", "", 0),
        ("", "", "", "", None),  # not Linux
    ]
    for meminfo, most, used, use, expected in cases:
        assert find_free_bytes(meminfo, most, used, use) == expected


def test_cores_are_those_of_the_machine_or_what_the_quota_amounts_to() -> None:
    cases: list[tuple[str, str, int | None]] = [
        (STAT, "", 4),
        (STAT, "max 100000\n", 4),
        (STAT, "250000 100000\n", 2),
        (STAT, "50000 100000\n", 1),
        ("", "800000 100000\n", 8),
        ("", "", None),
    ]
    for stat, quota, expected in cases:
        assert count_cores(stat, quota) == expected
