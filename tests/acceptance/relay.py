"""Relay: forwards connections from an address of ours to a server elsewhere.

It copies bytes and knows no protocol.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.tls import connect

Target = tuple[str, int] | str  # host and port, or the path of a socket
# Called with each piece that a client sends; after True the piece is forwarded and the connection breaks
# before the answer.
IsLast = Callable[[bytes], bool]


@contextmanager
def relay(
    address: tuple[str, int], target: Target, make_cut: Callable[[], IsLast] = lambda: lambda piece: False
) -> Iterator[None]:
    """Forward every connection to the target until the end of the block, which closes all of them.

    `make_cut` is called for each connection and returns the function that decides when to break it.
    """
    open_sockets: set[socket.socket] = set()
    with socket.create_server(address) as listener:

        def accept() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    client, _ = listener.accept()
                    server = connect(target)
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


def _copy(source: socket.socket, sink: socket.socket, is_last: IsLast, is_lost: threading.Event) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            if is_lost.is_set():  # this is the answer that the client must not get
                break
            if is_last(piece):
                is_lost.set()
            sink.sendall(piece)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
