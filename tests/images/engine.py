"""A container engine with images, containers and a socket of its own, which leaves nothing behind.

It makes no firewall rules and no default bridge, so it needs nothing of the machine but root and the programs.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.blackbox.service import wait_for

PROGRAMS = ("docker", "dockerd", "debootstrap")


def find_obstacle() -> str | None:
    """Return why no engine can be started here; None if one can."""
    if os.geteuid() != 0:
        return "only root can start a container engine"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"this machine has no {', '.join(missing)}"
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return "this machine's docker has no Compose, which must be 2.24 or newer"
    if subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return "another engine runs here, whose firewall rules would cut off the containers of a second one"
    return None


class Engine:
    """A running dockerd."""

    def __init__(self, folder: Path) -> None:
        self.environment = dict(os.environ) | {"DOCKER_HOST": f"unix://{folder}/socket"}

    def docker(
        self,
        *arguments: str,
        given: IO[bytes] | None = None,
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] = {},
    ) -> str:
        """Run the client; return what it prints, unless that goes to a file. A failure shows all that it said."""
        done = subprocess.run(
            ["docker", *arguments],
            env=self.environment | dict(environment),
            stdin=given or subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=1500,
        )
        printed = (done.stdout or b"").decode()
        assert done.returncode == 0, f"docker {' '.join(arguments)}\n{printed}\n{done.stderr.decode()}"
        return printed

    def is_up(self) -> bool:
        return subprocess.run(["docker", "info"], env=self.environment, capture_output=True).returncode == 0


@contextmanager
def new_engine(folder: Path) -> Iterator[Engine]:
    """Yield an engine whose files are in `folder`; end it, with all its containers, and remove its files."""
    command = [
        "dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/run", "--pidfile", f"{folder}/pid",
        "--host", f"unix://{folder}/socket", "--bridge", "none", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    engine = Engine(folder)
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(engine.is_up, f"the engine answers; its log is {folder}/dockerd.log", 60)
        yield engine
    finally:
        try:
            if containers := engine.docker("ps", "--all", "--quiet").split():
                engine.docker("rm", "--force", "--volumes", *containers)
            for network in engine.docker("network", "ls", "--quiet", "--filter", "driver=bridge").split():
                engine.docker("network", "rm", network)
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(folder / "data", ignore_errors=True)
