"""A relay between a client and an agent's row port that flips a bit of what the agent sends, or
stops to pass it on.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_END = b"\r\n\r\n"


class Relay:
    """Faults come behind so many more bytes of the agent, proofs not counted: `flip_in` flips a bit
    once, `stop_in` lets nothing more through while it is set.
    """

    def __init__(self, dial: Callable[[float], socket.socket]) -> None:
        self._dial = dial
        self.flip_in: int | None = None
        self.stop_in: int | None = None
        self._ends: list[socket.socket] = []

    def connect(self, timeout_s: float) -> socket.socket:
        """The client's end of a connection by way of this relay."""
        client, given = socket.socketpair()
        self._join(client, self._dial(timeout_s))
        return given

    def listen(self, port: int) -> None:
        """Relay what connects to a port of loopback, too."""
        listener = socket.create_server(("127.0.0.1", port))
        self._ends.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                self._join(client, self._dial(5.0))
            except OSError:
                client.close()

    def _join(self, client: socket.socket, agent: socket.socket) -> None:
        for end in (client, agent):
            end.settimeout(None)
        self._ends += [client, agent]
        for work in (self._forward, self._back):
            threading.Thread(target=work, args=(client, agent), daemon=True).start()

    def _forward(self, client: socket.socket, agent: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                agent.sendall(data)
        self._end(client, agent)

    def _back(self, client: socket.socket, agent: socket.socket) -> None:
        with suppress(OSError):
            proof = b""
            while not proof.endswith(_END):
                if not (byte := agent.recv(1)):
                    break
                proof += byte
            client.sendall(proof)
            while data := bytearray(agent.recv(1 << 16)):
                if self.flip_in is not None:
                    if self.flip_in < len(data):
                        data[self.flip_in] ^= 4
                    self.flip_in = None if self.flip_in < len(data) else self.flip_in - len(data)
                if self.stop_in is not None:
                    del data[self.stop_in :]
                    self.stop_in -= len(data)
                client.sendall(data)
        self._end(client, agent)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
