"""A checkout of the project, seen through links: all of its files but one, which loads an encoder of ours instead.

So a worker of any commit, started as it always is, has a device that is made up, and no code of the product knows of
it. The benchmarks themselves come from here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.order import BenchmarkFailed

ROOT: Final = Path(__file__).resolve().parents[3]
PRODUCT: Final = ("alembic", "api", "indexer", "scheduler", "vectormill", "worker")
# Where a runner looks for the function that loads its encoder; the older place last.
FACTORIES: Final = ("worker/backends/factory.py", "worker/model/factory.py")
FACTORY: Final = (
    '"""Loads an encoder that computes nothing."""\n'
    "from benchmarks.systems.host.made_up import load_encoder\n\n"
    '__all__ = ["load_encoder"]\n'
)
NOT_LINKED: Final = "__pycache__"


def link_tree(tree: Path, target: Path) -> Path:
    """`target`, from which a process imports the product of `tree` with the encoder of ours, and these benchmarks.

    Raises BenchmarkFailed when it is no checkout, or one whose encoders are loaded from somewhere else.
    """
    factory = next((name for name in FACTORIES if (tree / name).is_file()), None)
    if factory is None:
        raise BenchmarkFailed(f"{tree} is no checkout of the project with one of {', '.join(FACTORIES)}.")
    target.mkdir(parents=True)
    for name in PRODUCT:
        if (tree / name).exists():
            _link(tree, target, Path(name), Path(factory))
    (target / "benchmarks").symlink_to(ROOT / "benchmarks")
    return target


def python_environment(linked: Path) -> Mapping[str, str]:
    """Variables by which a process and its children import from there, wherever they are started."""
    return {"PYTHONPATH": str(linked), "PYTHONSAFEPATH": "1"}


def _link(tree: Path, target: Path, name: Path, replaced: Path) -> None:
    """Links a file or folder as a whole; one that holds the replaced file is made anew, with links to what it holds."""
    if name == replaced:
        (target / name).write_text(FACTORY, encoding="utf-8")
    elif name in replaced.parents:
        (target / name).mkdir()
        for entry in (tree / name).iterdir():
            if entry.name != NOT_LINKED:
                _link(tree, target, name / entry.name, replaced)
    else:
        (target / name).symlink_to((tree / name).resolve())
