"""Run the tests of the engine with versions of torch: `make test-torch`, or `python -m tools.torch_versions 2.11.0`.

Each version is installed into an environment of its own, before all other packages of this one, and removed afterwards.
`--torch-index` names the index of its wheels, as for `make setup`; those of pip's default take 3 GB each on Linux.
"""

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[1]
VERSIONS: Final = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# Tests of models, kernels and model processes, with and without the processes around them.
TESTS: Final = (
    "tests/unit/encoder",
    "tests/unit/model",
    "tests/unit/runner",
    "tests/integration/engine",
    "tests/contract/test_encoder_agrees.py",
    "tests/contract/test_packed_agrees.py",
    "tests/contract/test_shared_prefixes.py",
    "tests/contract/test_switches_agree.py",
)


def make_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, and return its Python. What it installs itself comes first."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "around.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def try_version(version: str, index: str, tests: tuple[str, ...]) -> str:
    """Test one version, and return what became of it in a few words; empty if all passed."""
    with TemporaryDirectory(prefix="vectormill-torch-") as folder:
        python = make_environment(Path(folder))
        chosen = ["--index-url", index] if index else []
        # Packages that torch requires are installed again, in the versions that fit this torch.
        wanted = ["--ignore-installed", "--quiet", *chosen, f"torch=={version}"]
        if subprocess.run([python, "-m", "pip", "install", *wanted], check=False).returncode:
            return "not available here"
        # OpenVINO takes models of the pinned torch alone, and computes without it.
        pytest = [
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-k",
            "not openvino",
            *tests,
        ]
        return "" if subprocess.run([python, *pytest], cwd=ROOT, check=False).returncode == 0 else "FAILED"


def main() -> None:
    """Test the versions, say what became of each, and exit with 1 if tests have failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--torch-index", default="")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    given = parser.parse_args()
    ends = {each: try_version(each, given.torch_index, tuple(given.tests)) for each in given.versions}
    for version, end in ends.items():
        sys.stdout.write(f"torch {version}: {end or 'passed'}\n")
    sys.exit("FAILED" in ends.values())


if __name__ == "__main__":
    main()
