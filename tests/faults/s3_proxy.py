"""A proxy on loopback in front of a real S3, which it knows well enough to fail as S3, a network or a clock can.

It forwards each request as it came, so signatures hold, over a connection of its own. `arm` makes it fail: the next
requests that match the event's target are hit, `event.times` of them, for LONGEST_ARMED_S at most. All other requests
go through.
"""

import http.client
import re
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.faults.schedule import TARGETS, Event

LONGEST_DELAY_S = 6.0
# Otherwise faults pile up for a part that is down or slow, and meet it for minutes on end when it comes back.
LONGEST_ARMED_S = 30.0
CLOSE_POLL_S = 0.02  # the standard library's half a second passes at each end of a test
HELD_BACK_BEHIND = 4  # later requests
HOLD_S = 3.0  # at most, where nothing follows
SKEW_S = 2 * 3600
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
_CODES = {
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
    409: "ConditionalRequestConflict",
}
_ENTRY = re.compile(rb"<Contents>(?:(?!</Contents>).)*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_HTML = b"<html><head><title>Sign in</title></head><body><p>This network needs a login.</p></body></html>"


@dataclass(frozen=True)
class Request:
    """A request as it came."""

    method: str  # LIST for a listing
    target: str  # path and query
    headers: list[tuple[str, str]]
    body: bytes
    key: str  # inside the run; of a listing its prefix

    @property
    def is_conditional(self) -> bool:
        return any(name.lower() == "if-none-match" for name, _ in self.headers)


@dataclass(frozen=True)
class Answer:
    """An answer on its way back."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    cut_at: int | None = None  # bytes of the body after which the connection ends


class S3Proxy:
    """Listens on `url`. Keys are those below `prefix` (bucket/…/run/); other requests are never hit."""

    def __init__(self, endpoint: str, prefix: str):
        self._address = urlsplit(endpoint).netloc
        self._prefix = prefix.strip("/") + "/"
        self._lock = threading.Condition()
        self._armed: list[tuple[float, Event]] = []  # when each lapses
        self._left: Counter[int] = Counter()  # hits to come, by event
        self.hits: Counter[int] = Counter()  # by event
        self.stored: list[tuple[float, str]] = []  # when and under which key the store took each put
        self._num_done = 0
        self._hidden: dict[str, bool] = {}  # full keys that listings leave out: whether one has
        self._forgotten: set[str] = set()  # keys whose user metadata is dropped
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(CLOSE_POLL_S,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def arm(self, event: Event) -> None:
        with self._lock:
            self._armed.append((time.monotonic() + LONGEST_ARMED_S, event))
            self._left[event.number] = event.times

    def disarm(self) -> None:
        """From now on every request goes through."""
        with self._lock:
            self._armed.clear()
            self._forgotten.clear()
            self._lock.notify_all()

    def serve(self, request: Request) -> Answer | None:
        """The answer; None: the connection ends without one."""
        event = self._take(request)
        try:
            return _FAULTS[event.kind](self, request, event) if event else self.forward(request)
        finally:
            with self._lock:
                self._num_done += 1
                self._lock.notify_all()

    def request_of(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Request:
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        path = unquote(parts.path).lstrip("/")
        if method == "GET" and "list-type" in query:
            folder = query.get("prefix", [""])[0] + ("" if "delimiter" in query else "**")
            method, path = "LIST", f"{path.rstrip('/')}/{folder}"
        key = path.removeprefix(self._prefix) if path.startswith(self._prefix) else ""
        return Request(method, target, headers, body, key)

    def forward(self, request: Request) -> Answer:
        """Sends the request to the store once."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        method = "GET" if request.method == "LIST" else request.method
        try:
            connection.putrequest(method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                if name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.putheader("Connection", "close")
            if request.body or method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body or None)
            found = connection.getresponse()
            answer = Answer(found.status, found.getheaders(), found.read())
        finally:
            connection.close()
        if method == "PUT" and answer.status == 200:
            self.stored.append((time.time(), request.key))
        return self._as_seen(request, answer)

    def _take(self, request: Request) -> Event | None:
        if not request.key and request.method != "LIST":
            return None
        said = f"{request.method} {request.key}"
        with self._lock:
            self._armed = [armed for armed in self._armed if armed[0] > time.monotonic()]
            for armed in self._armed:
                event = armed[1]
                if TARGETS[event.target].fullmatch(said) and _applies(event, request):
                    self._left[event.number] -= 1
                    if not self._left[event.number]:
                        self._armed.remove(armed)
                    self.hits[event.number] += 1
                    return event
        return None

    def _as_seen(self, request: Request, answer: Answer) -> Answer:
        """Without hidden entries and dropped metadata."""
        if request.key in self._forgotten and request.method in ("GET", "HEAD"):
            kept = [(name, value) for name, value in answer.headers if not name.lower().startswith("x-amz-meta-")]
            answer = replace(answer, headers=kept)
        if request.method == "LIST" and self._hidden:
            answer = self._without_hidden(answer)
        return answer

    def _without_hidden(self, answer: Answer) -> Answer:
        def seen(entry: re.Match[bytes]) -> bytes:
            key = unquote(entry[1].decode())  # clients ask for keys in a URL's form
            if key not in self._hidden:
                return entry[0]
            self._hidden[key] = True
            return b""

        with self._lock:
            body = _ENTRY.sub(seen, answer.body)
            self._lock.notify_all()
        return replace(answer, body=body)

    # --- the faults ---------------------------------------------------------------------------------------------------

    def delayed(self, request: Request, event: Event) -> Answer:
        time.sleep(LONGEST_DELAY_S * event.amount**2)  # most are short
        return self.forward(request)

    def cut_before(self, request: Request, event: Event) -> None:
        return None

    def cut_after(self, request: Request, event: Event) -> None:
        self.forward(request)

    def cut_body(self, request: Request, event: Event) -> Answer:
        answer = self.forward(request)
        return replace(answer, cut_at=int(len(answer.body) * event.amount))

    def refused(self, request: Request, event: Event) -> Answer:
        return _error(request, int(event.kind[:3]), _CODES[int(event.kind[:3])])

    def stored_then_412(self, request: Request, event: Event) -> Answer:
        """A first try was stored and its answer lost, so somebody on the way has tried again."""
        if "metadata" in event.kind:
            self._forgotten.add(request.key)
        self.forward(request)
        return self.forward(request)

    def duplicated(self, request: Request, event: Event) -> Answer:
        """The answer is the first one's or the second one's."""
        first, second = self.forward(request), self.forward(request)
        return first if event.amount < 0.5 else second

    def held_back(self, request: Request, event: Event) -> Answer:
        with self._lock:
            behind = self._num_done + HELD_BACK_BEHIND
            self._lock.wait_for(lambda: self._num_done >= behind, HOLD_S)
        return self.forward(request)

    def listing_is(self, request: Request, event: Event) -> Answer:
        body = _HTML if event.kind == "listing is HTML" else b""
        return Answer(200, [("Content-Type", "text/html" if body else "application/xml")], body)

    def listing_lags(self, request: Request, event: Event) -> Answer:
        """S3 may leave out of a listing only an object whose put has not been answered when the listing begins."""
        key = self._full_key(request)
        with self._lock:
            self._hidden[key] = False
        try:
            answer = self.forward(request)
            with self._lock:
                self._lock.wait_for(lambda: self._hidden[key], HOLD_S)
        finally:
            with self._lock:
                del self._hidden[key]
        return answer

    def skewed(self, request: Request, event: Event) -> Answer:
        """The store's clock differs: it says so in the header alone, or refuses the signature's time."""
        date = ("Date", formatdate(time.time() + (SKEW_S if event.amount < 0.25 else -SKEW_S), usegmt=True))
        answer = self.forward(request) if event.amount < 0.5 else _error(request, 403, "RequestTimeTooSkewed")
        return replace(answer, headers=[*(pair for pair in answer.headers if pair[0].lower() != "date"), date])

    def expired(self, request: Request, event: Event) -> Answer:
        return _error(request, 403, "ExpiredToken")

    def _full_key(self, request: Request) -> str:
        return (self._prefix + request.key).split("/", 1)[1]  # without the bucket


_FAULTS = {
    "delay": S3Proxy.delayed,
    "cut before the request": S3Proxy.cut_before,
    "cut after the store did it": S3Proxy.cut_after,
    "body cut short": S3Proxy.cut_body,
    "500": S3Proxy.refused,
    "503 SlowDown": S3Proxy.refused,
    "429": S3Proxy.refused,
    "409 conflict, nothing stored": S3Proxy.refused,
    "412 after it was stored": S3Proxy.stored_then_412,
    "412, and metadata dropped": S3Proxy.stored_then_412,
    "duplicated request": S3Proxy.duplicated,
    "held back behind later ones": S3Proxy.held_back,
    "listing is HTML": S3Proxy.listing_is,
    "listing is empty": S3Proxy.listing_is,
    "listing lags behind a put": S3Proxy.listing_lags,
    "skewed clock": S3Proxy.skewed,
    "403 ExpiredToken": S3Proxy.expired,
}


def _applies(event: Event, request: Request) -> bool:
    """409 and 412 answer conditional requests only. A multipart upload's parts come with a query: they do not count."""
    return request.is_conditional if event.kind[:3] in ("409", "412") else True


def _error(request: Request, status: int, code: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return Answer(status, [("Content-Type", "application/xml")], b"" if request.method == "HEAD" else body.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address) -> None:
        """A client that was killed has left its connection: no traceback for it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    proxy: S3Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        with suppress(ConnectionError, TimeoutError, http.client.HTTPException):  # then the connection ends
            request = self.proxy.request_of(self.command, self.path, list(self.headers.items()), self._body())
            if answer := self.proxy.serve(request):
                self._send(answer)
                return
        self._hang_up()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _HOP_BY_HOP or (self.command == "HEAD" and name.lower() == "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD" and answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(answer.body[: answer.cut_at])
        if answer.cut_at is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self) -> bytes:
        """Raises: ConnectionError: the client was killed in the middle. S3 stores nothing of such a request."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            parts = []
            while size := int(self._line().split(b";")[0], 16):
                parts.append(self._bytes(size))
                self._line()
            while self._line().strip():  # trailers
                pass
            return b"".join(parts)
        return self._bytes(int(self.headers.get("Content-Length") or 0))

    def _line(self) -> bytes:
        if line := self.rfile.readline():
            return line
        raise ConnectionError

    def _bytes(self, size: int) -> bytes:
        if len(found := self.rfile.read(size)) == size:
            return found
        raise ConnectionError

    def log_message(self, *_) -> None:
        pass
