"""Assets: scripts, styles and pictures of the console, under addresses that change with their content."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import Response
from starlette.exceptions import HTTPException

STATIC: Final = Path(__file__).parent / "static"
PREFIX: Final = "/console/static"
MEDIA_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# An address names its content, so nobody need ever ask again.
FOR_EVER: Final = "public, max-age=31536000, immutable"
DIGEST_LETTERS: Final = 12


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as a browser gets it; `digest` is of its content."""

    name: str
    path: Path
    media_type: str
    digest: str

    @property
    def url(self) -> str:
        return f"{PREFIX}/{self.digest}/{self.name}"


class Assets:
    """All of them by file name, which no two share. Their folders and the versions of vendored ones are no matter."""

    def __init__(self, directory: Path = STATIC) -> None:
        self._by_name: dict[str, Asset] = {}
        for path in sorted(directory.rglob("*")):
            if path.suffix in MEDIA_TYPES:
                assert path.name not in self._by_name, f"two assets are named {path.name}"
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_LETTERS]
                self._by_name[path.name] = Asset(path.name, path, MEDIA_TYPES[path.suffix], digest)

    def url(self, name: str) -> str:
        return self._by_name[name].url

    def answer(self, digest: str, name: str) -> Response:
        """Return the file. A page of another release names another digest: it gets ours, which it must not keep."""
        asset = self._by_name.get(name)
        if asset is None:
            raise HTTPException(404)
        kept = FOR_EVER if digest == asset.digest else "no-store"
        return Response(asset.path.read_bytes(), media_type=asset.media_type, headers={"Cache-Control": kept})
