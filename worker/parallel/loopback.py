"""Loopback: the environment in which ranks on one machine talk over its own interface. Starts nothing."""

import sys


def loopback_environment() -> dict[str, str]:
    """Gloo would else resolve the host's name, which in containers often leads nowhere."""
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
