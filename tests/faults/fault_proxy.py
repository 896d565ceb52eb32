"""A proxy on loopback that passes bytes to a real server, or fails itself when told: only the fault is fake."""

import socket
import threading
from contextlib import suppress

ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultProxy:
    """Listens on `url`. While `failing` is set every request is answered 503, on new connections and on open ones.
    While `cutting` is set, a connection that brings anything ends without an answer."""

    def __init__(self, host: str, port: int):
        self.failing, self.cutting = threading.Event(), threading.Event()
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target) as server:
            threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if self.cutting.is_set():
                    return
                if self.failing.is_set():
                    client.sendall(ANSWER)
                    return
                server.sendall(data)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
