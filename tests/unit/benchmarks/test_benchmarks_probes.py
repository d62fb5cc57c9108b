import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.probes.closeness import Closeness
from benchmarks.probes.memory import MemorySampler, private_bytes, resident_bytes
from benchmarks.probes.model_cost import ModelCost, read_shapes
from benchmarks.probes.process_tree import (
    MODEL_PROCESS,
    count_cpu_seconds,
    find_named,
    group_by_name,
    list_tree,
    name_process,
    subtract_readings,
)
from vectormill.models.registry import DEFAULT_MODEL, Registry

# Holds 64 MiB from a first line on its standard input until a second one.
GREEDY = (
    "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nheld = b'1' * (64 << 20)\n"
    "print('held', flush=True)\nsys.stdin.readline()"
)
MIB = 1 << 20


def test_memory_that_was_taken_and_given_back_within_the_block_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with MemorySampler([psutil.Process(child.pid)], pause_seconds=0.001) as memory:
            child.stdin.write("\n")
            assert child.stdout.readline() == "held\n"
            while memory.growth_bytes < 64 * MIB:  # the test's own time limit ends it
                pass
            child.stdin.write("\n")
            child.wait()
    assert memory.before_bytes > 0
    assert 64 * MIB <= memory.growth_bytes < 80 * MIB


def test_a_process_that_has_ended_takes_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
        child.wait()
    assert resident_bytes([process]) == private_bytes([process]) == 0


def test_what_a_process_shares_is_not_its_own() -> None:
    own = psutil.Process()
    held = bytearray(b"1" * (64 * MIB))
    assert 64 * MIB <= private_bytes([own]) < resident_bytes([own])
    assert group_by_name([own]) == {name_process(own.cmdline()): [own]}
    del held


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/v/bin/python", "-m", "vectormill.cli", "up", "--data-dir", "/d"], "up"),
        (["/v/bin/python", "-m", "vectormill.cli", "api", "--port", "1"], "api"),
        (["/v/bin/python", "-m", "vectormill.cli", "worker"], "worker's launcher"),
        (["/v/bin/python", "-m", "worker.app", "--model", "m"], "Celery worker"),
        (
            ["/v/bin/python", "-c", "from worker.runner.runner_process import main; main()", "3"],
            MODEL_PROCESS,
        ),
        (["/v/bin/python", "-m", "celery", "-A", "x", "flower"], "flower"),
        (["/opt/bin/postgres", "-D", "/d"], "postgres"),
        (["postgres: checkpointer "], "postgres"),
        (["/v/bin/valkey-server", "/d/valkey.conf"], "valkey"),
        (["/v/bin/valkey-server unixsocket:/d/s"], "valkey"),
        ([], "ended"),
    ],
)
def test_a_process_is_named_by_its_command_line(arguments: list[str], name: str) -> None:
    assert name_process(arguments) == name


def test_time_of_children_that_ended_is_counted_with_their_parent() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [process.pid for process in list_tree(child.pid)] == [child.pid]
        assert not find_named(list_tree(child.pid), MODEL_PROCESS)
        spent = sum(count_cpu_seconds(child.pid).values())
        child.communicate(b"\n")
    assert spent > 0.25 or sys.platform == "darwin"


def test_two_readings_are_subtracted_name_by_name_the_busiest_first() -> None:
    before, after = {"api": 1.0, "ended": 2.0}, {"api": 1.5, "worker": 3.0}
    assert list(subtract_readings(after, before).items()) == [("worker", 3.0), ("api", 0.5), ("ended", -2.0)]


def test_closeness_is_the_smallest_and_the_mean_cosine_over_all_rows() -> None:
    ours = np.array([[1, 0], [1, 1], [2, 0]], dtype=np.float32)
    theirs = np.array([[3, 0], [1, 0], [0, 1]], dtype=np.float32)
    found = Closeness.between(ours, theirs)
    assert found.smallest == pytest.approx(0)
    assert found.mean == pytest.approx((1 + np.sqrt(0.5)) / 3)


def test_a_vector_that_is_not_finite_cannot_go_unseen() -> None:
    ones = np.ones((2, 3), dtype=np.float32)
    broken = np.array([[1, 1, 1], [1, np.nan, 1]], dtype=np.float32)
    assert np.isnan(Closeness.between(broken, ones).smallest)


def test_the_operations_of_a_text_grow_with_its_length_and_in_attention_with_its_square() -> None:
    cost = ModelCost(num_layers=3, hidden_size=5, num_multiplied_parameters=7)
    assert cost.count_flop(np.array([2, 10])) == 2 * 7 * 12 + 4 * 3 * 5 * (4 + 100)


def test_shapes_are_read_from_the_header_of_a_safetensors_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    content = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(24))
    assert read_shapes(path) == {"a": [2, 3]}


def test_a_models_embeddings_are_looked_up_and_not_multiplied_with() -> None:
    cost = ModelCost.of(Registry({}).card(DEFAULT_MODEL, weights=True))
    # Of 22.7 million parameters 11.9 are embeddings, and 0.15 the pooler, which mean pooling leaves out.
    assert (cost.num_layers, cost.hidden_size) == (6, 384)
    assert 10.6e6 < cost.num_multiplied_parameters < 10.7e6
