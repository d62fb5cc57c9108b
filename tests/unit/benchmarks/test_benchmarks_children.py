"""The two sides of a child system: an encoder of this test, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.order import BenchmarkFailed
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.protocol import ChildOrder
from vectormill.cli.settings import read_environment

MODULE = """
import numpy as np
from benchmarks.systems.peers.serving import Encoded, read_order, serve

def load(order):
    if order.model == "broken":
        raise RuntimeError("no such model")
    return Toy()

class Toy:
    def __call__(self, texts):
        print("a library talks")
        if "stop" in texts:
            raise MemoryError("no room")
        lengths = np.array([[len(text)] for text in texts], dtype=np.float32)
        return Encoded(lengths, len(texts), 2 * len(texts))

    def report(self):
        return {"backend": "toy"}

serve(read_order(), load)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """One in which a child finds the module of this test."""
    (tmp_path / "toy_encoder.py").write_text(MODULE)
    return read_environment() | {
        "PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path), str(Path.cwd())])
    }


def make_order(directory: Path, model: str = "toy") -> ChildOrder:
    (directory / "texts.json").write_text(json.dumps({"three": ["a", "bb", "ccc"], "bad": ["stop"]}))
    return ChildOrder(
        model, str(directory / "texts.json"), str(directory / "toy.npy"), str(directory / "cache")
    )


def test_a_child_encodes_in_a_process_of_its_own_whatever_its_libraries_print(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    with ChildSystem("toy", "toy_encoder", make_order(tmp_path), environment) as child:
        child.warm_up("three")
        done = child.encode("three")
        assert (done.num_tokens, done.num_computed_tokens) == (3, 6)
        assert done.seconds > 0
        np.testing.assert_array_equal(child.vectors(), np.array([[1], [2], [3]], dtype=np.float32))
        assert child.report() == {"backend": "toy"}
        processes = child.find_processes()
        assert [process.pid for process in processes.model] == [process.pid for process in processes.whole]
    assert not any(process.is_running() for process in processes.whole)


def test_a_child_that_cannot_load_its_model_is_reported_with_its_last_words(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    child = ChildSystem("toy", "toy_encoder", make_order(tmp_path, "broken"), environment)
    with pytest.raises(BenchmarkFailed, match=r"toy ended before it answered(.|\n)*no such model"), child:
        pass


def test_a_child_that_dies_in_a_pass_is_reported_and_not_waited_for(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    with ChildSystem("toy", "toy_encoder", make_order(tmp_path), environment) as child:
        with pytest.raises(BenchmarkFailed, match=r"toy ended before it answered(.|\n)*no room"):
            child.encode("bad")
        with pytest.raises(BenchmarkFailed, match="toy ended"):
            child.encode("three")


def test_the_side_of_a_child_needs_nothing_that_a_peer_has_not() -> None:
    """numpy and the standard library: everything else would have to be of the same version in every environment."""
    program = (
        "import sys, benchmarks.systems.peers.serving\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in sys.argv[1:]))"
    )
    ours = ("vectormill", "worker", "psutil", "msgspec", "torch", "rich")
    done = subprocess.run([sys.executable, "-c", program, *ours], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
