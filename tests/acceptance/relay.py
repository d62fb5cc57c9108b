"""Relay: an address of ours behind which a server answers that listens elsewhere. Copies bytes; knows no protocol."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Target = tuple[str, int] | str  # host and port, or the path of a socket
# Told each piece that a client sends; True when it is passed on, and the connection breaks in place of the answer.
IsLast = Callable[[bytes], bool]


@contextmanager
def relay(
    address: tuple[str, int], target: Target, make_cut: Callable[[], IsLast] = lambda: lambda piece: False
) -> Iterator[None]:
    """Passes every connection on until the end of the context, which closes them all. Each has a cut of its own."""
    open_sockets: set[socket.socket] = set()
    with socket.create_server(address) as listener:

        def accept() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    client, _ = listener.accept()
                    server = _connect(target)
                    open_sockets.update((client, server))
                    is_lost = threading.Event()
                    there = (client, server, make_cut(), is_lost)
                    back = (server, client, lambda piece: False, is_lost)
                    for way in (there, back):
                        threading.Thread(target=_copy, args=way, daemon=True).start()

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


def _copy(source: socket.socket, sink: socket.socket, is_last: IsLast, is_lost: threading.Event) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            if is_lost.is_set():  # this is the answer that the client is not to get
                break
            if is_last(piece):
                is_lost.set()
            sink.sendall(piece)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
