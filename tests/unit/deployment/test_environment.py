"""deploy/environment.py: pip's configuration counts, the right torch is chosen, and a changed file is refused."""

import hashlib
import os
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.environment import (
    SOURCES,
    UV_NAMES,
    Installer,
    choose_torch,
    read_pip_options,
    translate_pip_options,
)

UV = Path(sys.executable).parent / "uv"


def test_of_pip_s_options_variables_come_first_and_those_of_other_commands_do_not_count() -> None:
    lines = [
        ":env:.index-url='https://variable/simple'",
        "global.index-url='https://global/simple'",
        "install.index-url='https://install/simple'",
        "install.find-links='/wheels\\n/more wheels'",
        "download.no-index='true'",
        "global.cert='/etc/ca.pem'",
    ]
    options = read_pip_options(lines)
    assert options == {
        "index-url": "https://variable/simple",
        "find-links": "/wheels\n/more wheels",
        "cert": "/etc/ca.pem",
    }


def test_what_pip_is_told_uv_is_told() -> None:
    cases: tuple[tuple[str, str, str, str], ...] = (
        ("index-url", "https://mirror/simple", "UV_DEFAULT_INDEX", "https://mirror/simple"),
        ("extra-index-url", "file:///a\nfile:///b", "UV_EXTRA_INDEX_URL", "file:///a file:///b"),
        ("find-links", "/a /b", "UV_FIND_LINKS", "/a,/b"),  # uv splits at commas
        ("no-index", "1", "UV_NO_INDEX", "true"),
        ("trusted-host", "mirror:8080 other", "UV_INSECURE_HOST", "mirror:8080 other"),
        ("cert", "/etc/ca.pem", "SSL_CERT_FILE", "/etc/ca.pem"),
        ("client-cert", "/etc/me.pem", "SSL_CLIENT_CERT", "/etc/me.pem"),
        ("proxy", "http://proxy:3128", "ALL_PROXY", "http://proxy:3128"),
    )
    for option, value, variable, translated in cases:
        assert UV_NAMES[option] == variable
        assert translate_pip_options({option: value}) == {variable: translated}


def test_options_without_a_meaning_for_uv_and_switches_that_are_off_say_nothing() -> None:
    assert translate_pip_options({"disable-pip-version-check": "1", "no-index": "false"}) == {}


VERSION = "torch==2.13.0"


def test_the_build_of_torch_fits_the_machine() -> None:
    cases: tuple[tuple[str, bool, bool, bool, list[tuple[str, ...]]], ...] = (
        (
            "",
            False,
            True,
            True,
            [(f"{VERSION}+cpu",), (VERSION,)],
        ),  # behind a mirror nothing outside it is asked
        ("", False, False, True, [(f"{VERSION}+cpu",), ("--torch-backend", "cpu", VERSION), (VERSION,)]),
        ("", True, False, True, [(VERSION,)]),  # the index has a CUDA build
        ("", False, False, False, [(VERSION,)]),  # for macOS there is one build
        (
            "x/cu126",
            False,
            False,
            True,
            [("--index-url", "x/cu126", "--reinstall-package", "torch", VERSION)],
        ),
    )
    for index, has_gpu, has_sources, is_linux, wanted in cases:
        builds = choose_torch(VERSION, index, has_gpu=has_gpu, has_sources=has_sources, is_linux=is_linux)
        assert [build.arguments for build in builds] == wanted
        assert [build for build in builds if build.outside] == [
            build for build in builds if "--torch-backend" in build.arguments
        ]
        if len(builds) > 1:
            assert "no CPU build is offered here" in builds[-1].said, "that it is dear is said"


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """Write a wheel of one empty module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{information}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index on the loopback that has `onlyhere` 1.0."""
    folder = tmp_path / "index" / "onlyhere"
    folder.mkdir(parents=True)
    wheel = make_wheel(folder, "onlyhere", "1.0")
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    handler = partial(QuietHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def make_installer(tmp_path: Path, configuration: str) -> Installer:
    """Return uv for an empty environment, told what pip says that it is configured for."""
    venv.create(tmp_path / "empty", with_pip=False)
    (tmp_path / "pip.conf").write_text(configuration, encoding="utf-8")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    command = [sys.executable, "-m", "pip", "config", "list"]
    pip = {**plain, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    listed = subprocess.check_output(command, env=pip, text=True).splitlines()
    options = read_pip_options(listed) | {"extra-index-url": "", "find-links": ""}
    own = {"VIRTUAL_ENV": str(tmp_path / "empty"), "UV_CACHE_DIR": str(tmp_path / "cache")}
    return Installer((str(UV), "pip"), {**plain, **translate_pip_options(options), **own}, is_uv=True)


def test_a_package_comes_of_the_index_in_pip_s_file_and_no_other(tmp_path: Path, index: str) -> None:
    installer = make_installer(tmp_path, f"[global]\nindex-url = {index}\n")
    assert any(installer.environment.get(name) for name in SOURCES)
    assert installer.try_to("install", "onlyhere==1.0")
    assert not installer.try_to("install", "six"), "the index has no six, and no other was asked"


def test_a_file_with_another_hash_than_the_lock_s_is_refused(tmp_path: Path, index: str) -> None:
    installer = make_installer(tmp_path, f"[global]\nindex-url = {index}\n")
    wheel = next((tmp_path / "index" / "onlyhere").glob("*.whl"))
    for digest, installs in (
        (hashlib.sha256(b"another").hexdigest(), False),
        (hashlib.sha256(wheel.read_bytes()).hexdigest(), True),
    ):
        lock = tmp_path / "lock.txt"
        lock.write_text(f"onlyhere==1.0 \\\n    --hash=sha256:{digest}\n", encoding="utf-8")
        assert installer.try_to("install", "--constraint", str(lock), "onlyhere") is installs
