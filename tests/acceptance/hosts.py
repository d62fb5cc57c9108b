"""Hosts: network namespaces whose workers reach the services over a link that tests can cut.

They need root and Linux. Each host has one link to the tests' namespace, and a relay at the link's other end
takes the place of the servers' addresses. Cutting the link cuts the host off from Postgres and Redis as an
unplugged cable does.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tests.acceptance.relay import Target, relay

# Enters the namespace, takes the host's name, and then becomes the command.
ENTER = (
    "import ctypes, os, socket, sys; from pyroute2 import netns; netns.setns(sys.argv[1]);"
    "assert ctypes.CDLL(None).unshare(0x04000000) == 0; socket.sethostname(sys.argv[2]);"  # CLONE_NEWUTS
    "os.execv(sys.argv[3], sys.argv[3:])"
)


def why_not() -> str:
    """Return why this machine cannot create hosts; an empty string when it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    from pyroute2 import netns

    name = f"vm-{uuid4().hex[:8]}"
    try:
        netns.create(name)
    except OSError as error:
        return f"this machine makes no network namespaces: {error}"
    netns.remove(name)
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace that acts as a host. `gateway` is the address at which it finds the services."""

    name: str
    gateway: str
    link: str

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", ENTER, self.name, self.name, sys.executable, *arguments]
        with log.open("ab") as output:
            return subprocess.Popen(command, env=dict(environment), stdout=output, stderr=output)

    def cut(self) -> None:
        self._set("down")

    def mend(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        from pyroute2 import IPRoute

        with IPRoute() as links:
            links.link("set", index=links.link_lookup(ifname=self.link)[0], state=state)


@contextmanager
def host(number: int, targets: Mapping[int, Target]) -> Iterator[Host]:
    """Create a host that reaches each target at its gateway and the target's port; remove it at the end."""
    from pyroute2 import IPRoute, NetNS, netns

    name = f"vm-{number}-{uuid4().hex[:6]}"
    # Random, because parallel tests create hosts too, and a killed test leaves its own behind.
    network = f"10.{random.randrange(128, 256)}.{random.randrange(256)}"
    ours, theirs = f"vmo{number}{uuid4().hex[:6]}", f"vmt{number}{uuid4().hex[:6]}"
    with IPRoute() as links, ExitStack() as cleanup:
        netns.create(name)
        cleanup.callback(netns.remove, name)
        links.link("add", ifname=ours, kind="veth", peer=theirs)
        index = links.link_lookup(ifname=ours)[0]
        cleanup.callback(links.link, "del", index=index)
        links.link("set", index=links.link_lookup(ifname=theirs)[0], net_ns_fd=name)
        links.addr("add", index=index, address=f"{network}.1", prefixlen=24)
        links.link("set", index=index, state="up")
        with NetNS(name) as inside:
            peer = inside.link_lookup(ifname=theirs)[0]
            inside.addr("add", index=peer, address=f"{network}.2", prefixlen=24)
            inside.link("set", index=peer, state="up")
            inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
        for port, target in targets.items():
            cleanup.enter_context(relay((f"{network}.1", port), target))
        yield Host(name, f"{network}.1", ours)
