"""Runs a module of this folder as a process of its own, from a linked tree, and reads the line of JSON it answers."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.order import BenchmarkFailed
from benchmarks.systems.host.tree import python_environment
from vectormill.settings import process_environment

ANSWER_SECONDS: Final = 600.0
SHOWN_CHARS: Final = 600


def run_pass(
    module: str, order: Mapping[str, Any], linked: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Raises BenchmarkFailed with its last words."""
    command = [sys.executable, "-m", module, json.dumps(order)]
    whole = {**process_environment(), **python_environment(linked), **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=whole, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkFailed(f"{module} did not answer within {ANSWER_SECONDS:.0f} s.") from error
    if done.returncode:
        raise BenchmarkFailed(f"{module} failed: {done.stderr.strip()[-SHOWN_CHARS:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
