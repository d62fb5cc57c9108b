"""An encoder that computes nothing and replaces a worker's own, so that all measured time is the host's.

It runs in the processes of any commit, so it looks for modules and types in every place where a commit may
have them.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ROOT: Final = Path(__file__).resolve().parents[2]
PRODUCT: Final = ("alembic", "api", "indexer", "scheduler", "vectormill", "worker")
# How the function that loads an encoder begins in every commit, whatever module it is in.
LOADER: Final = "\ndef load_encoder("
ENCODERS: Final = ("worker.model.encoder", "worker.encoder.encoder")
# Appended to that module: the rest of it is needed, and the last definition of a name is the one in force.
FACTORY: Final = "\n\nfrom benchmarks.children.null_device import load_encoder as load_encoder\n"
FACTORY_OF_OWN_VECTORS: Final = (
    "\n\nfrom benchmarks.children.null_device import load_own_encoder as load_encoder\n"
)
NUM_PARTS: Final = 8192


def link_tree(tree: Path, target: Path, has_own_vectors: bool = False) -> Path:
    """Fill `target` with links to a checkout and to these benchmarks, with a null encoder as the encoder.

    A worker of any commit, started as usual, then has a device that takes no time. Raise LookupError when
    `tree` is not a checkout of the project.
    """
    modules = sorted((tree / "worker").rglob("*.py"))
    factory = next((path for path in modules if LOADER in path.read_text(encoding="utf-8")), None)
    if factory is None:
        raise LookupError(f"{tree} is not a checkout of the project: its worker has no load_encoder().")
    target.mkdir(parents=True)
    for name in PRODUCT:
        if (tree / name).exists():
            _link(tree, target, Path(name), factory.relative_to(tree))
    if has_own_vectors:
        linked = target / factory.relative_to(tree)
        linked.write_text(linked.read_text(encoding="utf-8") + FACTORY_OF_OWN_VECTORS, encoding="utf-8")
    (target / "benchmarks").symlink_to(ROOT / "benchmarks")
    return target


def python_environment(linked: Path) -> Mapping[str, str]:
    """Return the environment variables that make a process and its children import from the linked tree."""
    return {"PYTHONPATH": str(linked), "PYTHONSAFEPATH": "1"}


def _link(tree: Path, target: Path, name: Path, replaced: Path) -> None:
    """Link `name` whole; a folder that contains the replaced file is created, and its contents are linked."""
    if name == replaced:
        (target / name).write_text((tree / name).read_text(encoding="utf-8") + FACTORY, encoding="utf-8")
    elif name in replaced.parents:
        (target / name).mkdir()
        for entry in (tree / name).iterdir():
            if entry.name != "__pycache__":
                _link(tree, target, name / entry.name, replaced)
    else:
        (target / name).symlink_to((tree / name).resolve())


def find_module(*names: str) -> Any:
    """Import and return the first of these modules that exists; modules have moved from commit to commit."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"none of these modules exists: {', '.join(names)}")


class NullEncoder:
    """An encoder that behaves as one on CUDA: packed, with the next batch queued.

    It returns fixed rows as vectors.
    """

    def __init__(self, order: Any) -> None:
        # All rows are nearly parallel, so a known text has the same vector wherever it is in a batch.
        random = np.random.default_rng(0)
        rows = random.standard_normal((4097, order.card.dimension), dtype=np.float32)
        self._rows: NDArray[np.float32] = rows[0] + np.float32(1e-3) * rows[1:]

    def prepare(self, batch: Any) -> "NullPass":
        lengths: Sequence[int] = (
            batch.inputs["input_ids"].lengths if hasattr(batch, "inputs") else batch.lengths
        )
        while len(lengths) > len(self._rows):
            self._rows = np.concatenate([self._rows, self._rows])
        return NullPass(self._rows[: len(lengths)])

    def encode(self, batch: Any) -> Any:
        done = self.prepare(batch)
        return done.results() if hasattr(batch, "inputs") else done.vectors()

    def describe(self) -> Any:
        encoder = find_module(*ENCODERS)
        because = "a benchmark of the host"
        known = {
            "device": encoder.Choice("null device", because), "backend": encoder.Choice("none", because),
            "precision": encoder.Choice("bf16", "as on a GPU"),
            "attention": "packed", "num_threads": 1, "load_seconds": 0.0, "is_packed": True, "is_queued": True,
        }  # fmt: skip
        names = {field.name for field in fields(encoder.EncoderReport)}
        return encoder.EncoderReport(**{name: value for name, value in known.items() if name in names})


@dataclass(slots=True)
class NullPass:
    """A forward pass that is done at once."""

    rows: NDArray[np.float32]

    def start(self) -> None:
        """Do nothing: there is nothing to compute."""

    def vectors(self) -> NDArray[np.float32]:
        """Return the rows as a matrix, as commits did before results had a type of their own."""
        return self.rows

    def results(self) -> Any:
        return find_module("vectormill.ragged").Ragged.from_matrix(self.rows)


def load_encoder(order: Any) -> NullEncoder:
    """Return the null encoder, under the name of the worker's function that it replaces."""
    return NullEncoder(order)


class OwnVectors(NullEncoder):
    """A null encoder that gives each text the sum of two random vectors, which its tokens choose."""

    def __init__(self, order: Any) -> None:
        super().__init__(order)
        random = np.random.default_rng(0)
        shape = (2, NUM_PARTS, order.card.dimension)
        self._parts: NDArray[np.float32] = random.standard_normal(shape, dtype=np.float32)

    def prepare(self, batch: Any) -> NullPass:
        ids = batch.inputs["input_ids"]
        mixed = (ids.covered.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        chosen = np.add.reduceat(mixed ^ (mixed >> np.uint64(32)), ids.offsets[:-1] - ids.offsets[0])
        first, second = chosen % NUM_PARTS, (chosen // NUM_PARTS) % NUM_PARTS
        return NullPass(self._parts[0, first] + self._parts[1, second])


def load_own_encoder(order: Any) -> OwnVectors:
    """Return the null encoder whose texts have vectors of their own."""
    return OwnVectors(order)
