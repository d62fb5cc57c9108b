"""Places: where a local file of a source may lie."""

from pathlib import Path

from vectormill.domain.errors import SourceFailed


def check_local(path: Path, root: Path | None) -> Path:
    """The path, if it lies below the root, links followed. A relative one begins there. Raises SourceFailed."""
    if root is None:
        if not path.is_absolute():
            raise SourceFailed(
                f"{path} is a relative path, which means another file in each process; give an absolute one, or set "
                "VECTORMILL_SOURCE_ROOT."
            )
        return path
    start = root.expanduser().resolve()
    whole = start / path
    if not whole.resolve().is_relative_to(start):
        raise SourceFailed(f"{path} is not below {start}, where sources may lie (VECTORMILL_SOURCE_ROOT).")
    return whole
