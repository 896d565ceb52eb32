"""A server on loopback that passes requests to a real S3 server, but for those that a test has it answer wrongly."""

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

CLOSE_POLL_S = 0.02  # the standard library's half a second passes at each end of a test


@dataclass
class Request:
    method: str
    path: str  # with its query
    headers: dict[str, str]  # names in small letters
    body: bytes

    @property
    def is_listing(self) -> bool:
        return "list-type" in parse_qs(urlsplit(self.path).query)


def raw(status: str, body: bytes = b"", content_type: str = "application/xml", length: int | None = None) -> bytes:
    """An answer, after which the connection ends. length: its Content-Length, if that is to be wrong."""
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def error(status: str, code: str) -> bytes:
    """S3's answer of an error."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made up</Message></Error>"
    return raw(status, body.encode())


class WrongAnswers:
    """Listens on `url`. `wrong(request)` returns the bytes of a wrong answer, or None for the real one."""

    def __init__(self, target: str):
        self.wrong: Callable[[Request], bytes | None] = lambda request: None
        self.seen: list[Request] = []
        self._target = urlsplit(target).netloc
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self):
                self.raw_requestline = self.rfile.readline(1 << 16)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(
                    self.command, self.path, {name.lower(): text for name, text in self.headers.items()}, body
                )
                outer.seen.append(request)
                if (answer := outer.wrong(request)) is not None:
                    self.close_connection = True
                    head, _, _ = answer.partition(b"\r\n\r\n")
                    self.wfile.write(head + b"\r\n\r\n" if self.command == "HEAD" else answer)
                else:
                    self.wfile.write(outer.forward(request))
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(CLOSE_POLL_S,), daemon=True).start()

    def forward(self, request: Request, drop_headers: str = "") -> bytes:
        """The real server's answer, as bytes; without the headers that begin with `drop_headers`."""
        connection = http.client.HTTPConnection(self._target)
        connection.request(request.method, request.path, request.body, request.headers)
        answer = connection.getresponse()
        body = answer.read()
        skipped = {"transfer-encoding", "connection"}
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        for name, value in answer.getheaders():
            if name.lower() not in skipped and not (drop_headers and name.lower().startswith(drop_headers)):
                lines.append(f"{name}: {value}")
        if answer.getheader("Content-Length") is None:
            lines.append(f"Content-Length: {len(body)}")
        connection.close()
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def times(self, number: int, answer: bytes, when: Callable[[Request], bool] = lambda request: True) -> None:
        """The next `number` requests that fit get this answer."""
        left = [number]

        def wrong(request: Request) -> bytes | None:
            if left[0] and when(request):
                left[0] -= 1
                return answer
            return None

        self.wrong = wrong

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
