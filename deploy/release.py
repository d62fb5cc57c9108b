"""Build what a release consists of, all with one version: wheel, sdist, chart, bill of materials, images, provenance,
checksums, and with a key of ssh their signature.

It knows nothing of publishing. `make release VERSION=x.y.z` runs it (docs/DEVELOPMENT.md, "Release").
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

from deploy.environment import (
    PROJECT,
    ROOT,
    SetupFailed,
    compile_pins,
    find_installer,
    list_pip_options,
    read_extra,
)

CHART: Final = ROOT / "deploy/helm/vectormill"
IMAGES: Final = ("api", "worker")
SUMS: Final = "SHA256SUMS"
# ssh-keygen writes this namespace into a signature, so that a signature made for another purpose does not verify.
NAMESPACE: Final = "vectormill-release"
VERIFY: Final = f"""Publish the public key where nobody who can change the files can change it, as a line in a file
`allowed_signers`: the word releases, and then the words of the .pub file. Everybody verifies the release by:
  ssh-keygen -Y verify -f allowed_signers -I releases -n {NAMESPACE} -s {SUMS}.sig < {SUMS}
  sha256sum --check {SUMS}"""
UNSIGNED: Final = (
    "It is not signed: no key was given. `make release VERSION=x.y.z RELEASE_KEY=~/.ssh/id_ed25519` signs it."
)
PUBLIC: Final = """provenance.json says what was built from which commit, by the word of who ran this. The CI of a
public repository would add what nobody can say of themselves: a signature by its own identity, made by Sigstore in a
public log (cosign, gh attestation), PyPI's attestations by trusted publishing, and the digests of the images that it
pushed."""


class ReleaseRefused(Exception):
    """The tree is not one that can be released; the sentence says why."""


def main() -> None:
    """Build the release that the command line names into dist/."""
    parser = argparse.ArgumentParser(description="Build every file and image of a release.")
    parser.add_argument("version", help="the version, as in the tag without its v")
    parser.add_argument(
        "--key",
        help="the private key of ssh by which the checksums are signed, or its public key in an agent",
    )
    parser.add_argument("flags", nargs="*", help="further flags of `docker build`, after --")
    asked = parser.parse_args()
    try:
        check(asked.version)
        output = build(asked.version, asked.flags)
        if asked.key:
            sign(output / SUMS, asked.key)
    except (ReleaseRefused, SetupFailed, helm_python.HelmError, subprocess.CalledProcessError) as error:
        sys.exit(f"There is no release: {error}")
    say(f"The release is in {output.relative_to(ROOT)}:")
    say((output / SUMS).read_text(encoding="utf-8"))
    say(VERIFY if asked.key else UNSIGNED)
    say(PUBLIC)


def say(sentence: str) -> None:
    """Print a line on stdout."""
    sys.stdout.write(f"{sentence}\n")


# -- What may be released ----------------------------------------------------------------------------------------------


def check(version: str) -> None:
    """Raise ReleaseRefused unless the tree is clean, is at the version's tag, and states this version everywhere."""
    if read_git("status", "--porcelain"):
        raise ReleaseRefused("the tree has changes that are not committed; commit or remove them")
    if f"v{version}" not in read_git("tag", "--points-at", "HEAD").split():
        raise ReleaseRefused(f"this commit has no tag v{version}; check out that tag, or make it")
    for place, stated in read_versions().items():
        if stated != version:
            raise ReleaseRefused(f"{place} states version {stated} and not {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        raise ReleaseRefused(f"CHANGELOG.md has no section [{version}] with a date")


def read_git(*arguments: str) -> str:
    """Return what git prints about this tree."""
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def read_versions() -> Mapping[str, str]:
    """Return the version of each place that states one."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    module = ast.parse((ROOT / "vectormill/__init__.py").read_text(encoding="utf-8"))
    return {
        "pyproject.toml": tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"],
        "vectormill/__init__.py": next(
            str(ast.literal_eval(line.value))
            for line in module.body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__version__"
        ),
        "the chart's version": chart["version"],
        "the chart's appVersion": chart["appVersion"],
    }


# -- What it consists of -----------------------------------------------------------------------------------------------


def build(version: str, image_flags: Sequence[str]) -> Path:
    """Build everything into an empty folder, and return it. Files carry the time of the commit, not of the build."""
    output = ROOT / "dist" / f"vectormill-{version}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    environment = dict(os.environ) | {"SOURCE_DATE_EPOCH": read_git("show", "--no-patch", "--format=%ct")}
    run("-m", "build", "--no-isolation", "--quiet", "--outdir", str(output), environment=environment)
    helm_python.package(CHART, destination=output)
    list_components(output / f"vectormill-{version}.cdx.json", environment)
    if images := build_images(version, *image_flags):
        (output / "images.txt").write_text("".join(f"{line}\n" for line in images), encoding="utf-8")
    else:
        say("No images are built, because no container engine answers here.")
    provenance = state_provenance(version, image_flags, sum_files(output))
    (output / "provenance.json").write_text(f"{json.dumps(provenance, indent=2)}\n", encoding="utf-8")
    sums = [f"{digest}  {name}\n" for name, digest in sum_files(output).items()]
    (output / SUMS).write_text("".join(sums), encoding="utf-8")
    return output


def sum_files(folder: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def state_provenance(version: str, image_flags: Sequence[str], built: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the provenance of files as a statement of in-toto with a predicate of SLSA, both in version 1."""
    lock = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in built.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:vectormill:deploy/release.py",
                "externalParameters": {"version": version, "imageFlags": [*image_flags]},
                "resolvedDependencies": [
                    {"uri": "urn:vectormill:source", "digest": {"gitCommit": read_git("rev-parse", "HEAD")}},
                    {"uri": "urn:vectormill:requirements.lock", "digest": {"sha256": lock}},
                ],
            },
            "runDetails": {"builder": {"id": "urn:vectormill:make-release"}},
        },
    }


def sign(sums: Path, key: str) -> None:
    """Write the signature of the checksums beside them. Raise CalledProcessError without such a key."""
    sign_file = ["ssh-keygen", "-Y", "sign", "-f", str(Path(key).expanduser()), "-n", NAMESPACE, str(sums)]
    subprocess.run(sign_file, check=True, capture_output=True)


def run(*arguments: str, environment: Mapping[str, str]) -> None:
    """Run Python in the root of the tree."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True)


def list_components(output: Path, environment: Mapping[str, str]) -> None:
    """Write a CycloneDX list of all that `vectormill[all]` installs, in the versions of the lock, with their hashes."""
    pins = output.with_suffix(".txt")
    compile_pins(
        find_installer(environment, list_pip_options()), "--quiet", "--constraint", "requirements.lock", "--extra",
        "all", "--universal", "--generate-hashes", "--output-file", str(pins), PROJECT.name,
    )  # fmt: skip
    torch = next(line for line in read_extra("worker") if line.startswith("torch=="))
    with pins.open("a", encoding="utf-8") as file:
        file.write(f"{torch}\n")
    run(
        "-W", "ignore::UserWarning", "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--mc-type",
        "application", "--pyproject", PROJECT.name, "--output-file", str(output), str(pins),
        environment=environment,
    )  # fmt: skip
    pins.unlink()


def build_images(version: str, *flags: str) -> list[str]:
    """Build both images, and return the name and the id of each; an empty list if no engine answers."""
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    built = []
    for image in IMAGES:
        name = f"vectormill-{image}:{version}"
        labels = (f"version={version}", f"revision={read_git('rev-parse', 'HEAD')}")
        options = [word for label in labels for word in ("--label", f"org.opencontainers.image.{label}")]
        subprocess.run(
            ["docker", "build", *flags, *options, "--file", f"deploy/Dockerfile.{image}", "--tag", name, "."],
            cwd=ROOT,
            check=True,
        )
        image_id = subprocess.check_output(["docker", "inspect", "--format", "{{.Id}}", name], text=True)
        built.append(f"{name} {image_id.strip()}")
    return built


if __name__ == "__main__":
    main()
