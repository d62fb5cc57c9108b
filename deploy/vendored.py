"""Update the third-party files of the console: `python -m deploy.vendored` extracts them from npm packages.

Needs npm and its registry. Developers run it after changing a version here; users have the files in the
wheel.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VENDOR: Final = Path(__file__).parent.parent / "api" / "console" / "static" / "vendor"


@dataclass(frozen=True, slots=True)
class Package:
    """An npm package, its exact version and the files that browsers load.

    `folder` is the package's name without its scope.
    """

    name: str
    version: str
    folder: str
    files: tuple[str, ...]
    why: str


PACKAGES: Final = (
    Package(
        "htmx.org",
        "4.0.1",
        "htmx",
        ("dist/htmx.min.js", "dist/ext/hx-sse.min.js", "LICENSE"),
        "swaps parts of a page, and follows streams of them",
    ),
    Package(
        "uplot",
        "1.6.32",
        "uplot",
        ("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE"),
        "draws charts",
    ),
    Package(
        "@picocss/pico",
        "2.1.1",
        "pico",
        ("css/pico.min.css", "LICENSE.md"),
        "how tables, forms and buttons look, dark and light",
    ),
    Package(
        "swagger-ui-dist",
        "5.35.0",
        "swagger-ui-dist",
        (
            "swagger-ui-bundle.js",
            "swagger-ui-bundle.js.LICENSE.txt",
            "swagger-ui.css",
            "LICENSE",
            "NOTICE",
        ),
        "shows /docs",
    ),
)

README: Final = """# Third-party files

Taken unchanged from npm packages by `python -m deploy.vendored`, which also wrote this page. To update one, change its
version in `deploy/vendored.py`, run that (it needs npm), then `make test-browser`. Pages name a file without its
version. Each folder has the package's licence.

| package | version | files | what for | SHA-256 of the package |
| --- | --- | --- | --- | --- |
"""


def main() -> None:
    if shutil.which("npm") is None:
        sys.exit("npm is needed to update these files, but is not installed.")
    rows = [renew(package) for package in PACKAGES]
    (VENDOR / "README.md").write_text(README + "".join(f"{row}\n" for row in rows), encoding="utf-8")


def renew(package: Package) -> str:
    """Replace all folders of the package by one with this version, and return its row of the README."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=directory, check=True
        )
        (archive,) = Path(directory).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        for old in VENDOR.glob(f"{package.folder}-[0-9]*"):
            shutil.rmtree(old)
        target = VENDOR / f"{package.folder}-{package.version}"
        target.mkdir(parents=True)
        with tarfile.open(archive) as opened:
            for name in package.files:
                content = opened.extractfile(f"package/{name}")
                assert content is not None, name
                (target / Path(name).name).write_bytes(content.read())
    files = ", ".join(f"`{Path(name).name}`" for name in package.files)
    return f"| `{package.name}` | {package.version} | {files} | {package.why} | `{digest}` |"


if __name__ == "__main__":
    main()
