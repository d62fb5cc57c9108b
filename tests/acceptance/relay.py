"""Relay: an address of ours behind which a server answers that listens elsewhere. Copies bytes; knows no protocol."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Target = tuple[str, int] | str  # host and port, or the path of a socket


@contextmanager
def relay(address: tuple[str, int], target: Target) -> Iterator[None]:
    """Passes every connection on until the end of the context, which closes them all."""
    open_sockets: set[socket.socket] = set()
    with socket.create_server(address) as listener:

        def accept() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    client, _ = listener.accept()
                    server = _connect(target)
                    open_sockets.update((client, server))
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=_copy, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in open_sockets:
                each.close()


def _connect(target: Target) -> socket.socket:
    if isinstance(target, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(target)
        return connection
    return socket.create_connection(target)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            sink.sendall(piece)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
