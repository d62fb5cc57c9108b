"""Let several systems encode the same texts in turn, repeatedly, and record the results."""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.children.serving import ChildOrder, Pass
from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.processes import MODEL_PROCESS, find_named, list_tree, sample_memory
from benchmarks.tables import NOT_MEASURED, Spread, Table
from vectormill.domain.errors import VectormillError
from vectormill.processes.logs import open_log, tail_of

# A pass takes seconds, but its memory changes with each batch, which takes a tenth of a second.
SAMPLE_SECONDS: Final = 0.02
STOP_SECONDS: Final = 15.0
# Loading may first export a model, and a pass of a slow encoder takes minutes. A child that is silent for
# longer hangs.
ANSWER_SECONDS: Final = 1200.0
SHOWN_CHARS: Final = 300
FAILURES: Final = (BenchmarkFailed, VectormillError, psutil.Error, OSError, ValueError)

# The processes that hold the model, and these together with all that feed them and store their results.
Processes = tuple[Sequence[psutil.Process], Sequence[psutil.Process]]


class System(Protocol):
    """A system that encodes mixes of texts. Entering starts and loads it, and may raise BenchmarkFailed."""

    name: str

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: object) -> None: ...

    def warm_up(self, mix: str) -> None:
        """Encode a tenth of the mix, so that one-time work is done before anything is timed."""

    def encode(self, mix: str) -> Pass:
        """Encode all texts of the mix."""

    def vectors(self) -> NDArray[np.float32]:
        """Return the vectors of the last pass [n, dimension], in the order of its texts."""

    def report(self) -> dict[str, Any]:
        """Return the system's report about itself; empty when it has none."""

    def find_processes(self) -> Processes:
        """Return the processes that hold the model, and all processes of the system whose memory counts."""


@dataclass(slots=True)
class Record:
    """The passes of one system over one mix, or in `failure` the reason why there are none."""

    name: str
    passes: list[Pass] = field(default_factory=list)
    model_peak_bytes: int = 0
    whole_peak_bytes: int = 0
    vectors: NDArray[np.float32] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def seconds(self) -> list[float]:
        return [done.seconds for done in self.passes]

    def rate(self, count: float) -> Spread:
        """Return the rate per second of a pass that handles `count` things, such as texts or tokens."""
        return Spread.of([count / seconds for seconds in self.seconds()])

    def speed_against(self, other: "Record") -> Spread:
        """Return how many times faster this system is than another, per repetition."""
        return Spread.of_ratios(other.seconds(), self.seconds())


# Title of a column -> function that writes its cell from a system's key and its record.
Columns = Mapping[str, Callable[[str, Record], str]]


class Records(dict[str, Record]):
    """The records of all systems for the same mix, by the key of the system."""

    def measured(self, key: str | None) -> Record | None:
        """Return the record of a system if it was measured, else None."""
        record = self.get(key) if key is not None else None
        return record if record is not None and record.passes and record.failure is None else None

    def speed(self, key: str, other: str | None) -> Spread | None:
        record, against = self.measured(key), self.measured(other)
        return record.speed_against(against) if record and against else None

    def cosines(self, key: str, other: str) -> tuple[float, float] | None:
        """Return the smallest and the mean cosine of two systems' vectors, NaN where a row is not finite.

        Return None when one of the two was not measured or the shapes differ.
        """
        pair = [record.vectors for record in (self.measured(key), self.measured(other)) if record is not None]
        left, right = pair if len(pair) == 2 else (None, None)
        if left is None or right is None or left.shape != right.shape:
            return None
        left, right = left.astype(np.float64), right.astype(np.float64)
        lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        cosines = np.einsum("nd,nd->n", left, right) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return float(cosines.min()), float(cosines.mean())

    def tabulate(self, title: str, columns: Columns) -> Table:
        """Return a table with a row for each system; the row of one that was not measured says so."""
        rows = []
        for key, record in self.items():
            sound = self.measured(key)
            cells = [write(key, sound) for write in columns.values()] if sound else [NOT_MEASURED]
            rows.append((record.name, *cells, *[""] * (len(columns) - len(cells))))
        return Table((title, *columns), tuple(rows))

    def list_reasons(self) -> list[str]:
        """Return a sentence for each system that was not measured, with the last line of its reason."""
        return [
            f"{record.name} was not measured: {find_last_line(record.failure)}"
            for record in self.values()
            if record.failure is not None
        ]


def find_last_line(text: str) -> str:
    """Return the last non-empty line of a text, shortened. In a log that is the error itself."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1][:SHOWN_CHARS]


class Turns:
    """A context manager that starts several systems and lets them encode in turn.

    A system that fails is skipped from then on, and the reason is recorded in `failures`.
    """

    def __init__(self, systems: Mapping[str, System], harness: Harness) -> None:
        self._systems = systems
        self._say = harness.say
        self._exits = ExitStack()
        self.failures: dict[str, str] = {}

    def __enter__(self) -> "Turns":
        with ExitStack() as exits:
            for key, system in self._systems.items():
                self._say(f"starting {system.name}")
                self._try(key, partial(_enter, exits, system))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def run(self, mix: str, repeat: int) -> Records:
        """Warm up all systems, then let them encode the mix in turn, `repeat` times.

        Taking turns spreads a slowdown of the machine over all systems.
        """
        records = Records({key: Record(system.name) for key, system in self._systems.items()})
        for key, system in self._systems.items():
            self._say(f"{mix}: warming up {system.name}")
            self._try(key, partial(system.warm_up, mix))
        for number in range(repeat):
            for key, system in self._systems.items():
                self._say(f"{mix}: {system.name}, pass {number + 1} of {repeat}")
                self._try(key, partial(_encode, system, mix, records[key]))
        for key, system in self._systems.items():
            self._try(key, partial(_read, system, records[key]))
            if key in self.failures:
                records[key] = Record(system.name, failure=self.failures[key])
        return records

    def _try(self, key: str, act: Callable[[], object]) -> None:
        if key not in self.failures:
            try:
                act()
            except FAILURES as error:
                self.failures[key] = str(error)


def _enter(exits: ExitStack, system: System) -> None:
    system.__enter__()
    exits.push(system.__exit__)


def _encode(system: System, mix: str, record: Record) -> None:
    model, whole = system.find_processes()
    with sample_memory(model, SAMPLE_SECONDS) as of_model, sample_memory(whole, SAMPLE_SECONDS) as of_whole:
        record.passes.append(system.encode(mix))
    record.model_peak_bytes = max(record.model_peak_bytes, of_model.peak_bytes)
    # The two are sampled at different moments, but the whole is never less than its part.
    record.whole_peak_bytes = max(record.whole_peak_bytes, of_whole.peak_bytes, record.model_peak_bytes)


def _read(system: System, record: Record) -> None:
    record.vectors, record.report = system.vectors(), system.report()


class MissingRows:
    """A stand-in for a system that cannot run here; its record carries the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def __enter__(self) -> object:
        raise BenchmarkFailed(self._reason)

    def __exit__(self, *exception: object) -> None:
        """Do nothing: nothing was started."""

    def _raise(self, *_: object) -> Any:
        raise BenchmarkFailed(self._reason)

    warm_up = encode = vectors = report = find_processes = _raise


class Child:
    """A system in a child process, run as `python -m MODULE ORDER`.

    benchmarks.children.serving has the child's side. `python` may belong to another environment, which needs
    numpy and the imports of the module.
    """

    def __init__(
        self,
        name: str,
        module: str,
        order: ChildOrder,
        environment: Mapping[str, str],
        python: Path | str = sys.executable,
    ) -> None:
        self.name = name
        self._python = str(python)
        self._module = module
        self._order = order
        self._environment = environment
        self._log = Path(order.vectors).with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Child":
        """Start the child and wait until its model is loaded."""
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [self._python, "-m", self._module, json.dumps(asdict(self._order))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(self._environment),
            )
        try:
            self._answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def warm_up(self, mix: str) -> None:
        self._ask(f"warm_up {mix}")

    def encode(self, mix: str) -> Pass:
        return Pass(**self._ask(f"encode {mix}"))

    def report(self) -> dict[str, Any]:
        """Return the encoder's report about itself; empty when the encoder has none."""
        return self._ask("report")

    def vectors(self) -> NDArray[np.float32]:
        self._ask("save")
        vectors: NDArray[np.float32] = np.load(self._order.vectors)
        return vectors

    def find_processes(self) -> Processes:
        tree = list_tree(self._running().pid)
        # A child without a separate model process holds the model itself.
        return find_named(tree, MODEL_PROCESS) or tree[:1], tree

    def _ask(self, command: str) -> dict[str, Any]:
        stream = self._running().stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended, which the missing answer reports
            stream.write(command.encode() + b"\n")
            stream.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stream = self._running().stdout
        assert stream is not None
        if not select.select([stream], [], [], ANSWER_SECONDS)[0]:
            raise BenchmarkFailed(f"{self.name} did not answer within {ANSWER_SECONDS:.0f} s.")
        line = stream.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):  # until its log is complete
                self._running().wait(STOP_SECONDS)
            raise BenchmarkFailed(f"{self.name} ended before it answered:{tail_of(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "the child is started by entering it"
        return self._process

    def _stop(self) -> None:
        """Close the child's streams, which ends the child; kill it when it does not end in time."""
        process = self._running()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
