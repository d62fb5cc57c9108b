"""The processes of a model that several devices share, as the test that started them sees them."""

import psutil


def rank_pids() -> list[int]:
    return [
        child.pid for child in psutil.Process().children() if "runner_process" in " ".join(child.cmdline())
    ]
