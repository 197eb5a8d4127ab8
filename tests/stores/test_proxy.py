"""The faulty proxy itself, between plain clients and a plain server: it needs no packages."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from servers.proxy import FaultyProxy

BIG = bytes(range(256)) * 8192  # 2 MiB


class Upstream(http.server.ThreadingHTTPServer):
    """Keeps what is PUT, and every request's method, path, Host and body."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.seen: list[tuple[str, str, str, bytes]] = []
        self.broken: list[str] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.broken.append("a connection broke")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def log_message(self, *_: Any) -> None:
        return

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            size = int(self.headers.get("Content-Length", 0))
            data = self.rfile.read(size)
            if len(data) != size:
                raise ConnectionError("half a body")
            return data
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def serve(self) -> None:
        data = self.body()
        self.server.seen.append((self.command, self.path, self.headers["Host"], data))
        if self.command in ("PUT", "POST"):
            found = self.path in self.server.objects
            if found and self.headers.get("If-None-Match"):
                return self.answer(412)
            self.server.objects[self.path] = data
            return self.answer(200)
        content = self.server.objects.get(self.path)
        if content is None:
            return self.answer(404, b"no such thing")
        return self.answer(200, content)

    def answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        if self.path.endswith("?chunked") and content:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(content), 50_000):
                part = content[start : start + 50_000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path.endswith("?close"):
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = serve  # noqa: N815 - the names http.server looks for


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[FaultyProxy]:
    with FaultyProxy("127.0.0.1", upstream.server_port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultyProxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    yield connection
    connection.close()


def ask(
    client: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    client.request(method, path, body, fields, encode_chunked="Transfer-Encoding" in fields)
    response = client.getresponse()
    return response.status, response.read()


class TestPassingOn:
    def test_requests_and_responses_on_one_connection(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        assert ask(client, "PUT", "/a", BIG) == (200, b"")
        opened = client.sock
        assert ask(client, "GET", "/a") == (200, BIG)
        assert ask(client, "HEAD", "/a") == (200, b"")
        assert ask(client, "GET", "/b") == (404, b"no such thing")
        assert ask(client, "PUT", "/empty", b"") == (200, b"")
        assert ask(client, "GET", "/empty") == (200, b"")
        assert client.sock is opened
        assert [(r.method, r.target, r.status) for r in proxy.requests[:3]] == [
            ("PUT", "/a", 200),
            ("GET", "/a", 200),
            ("HEAD", "/a", 200),
        ]
        assert [r.sent for r in proxy.requests[:2]] == [len(BIG), 0]
        assert [r.received for r in proxy.requests[:2]] == [0, len(BIG)]

    def test_the_host_header_stays_the_clients(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        ask(client, "GET", "/a")
        ask(client, "GET", "/a", Host="bucket.example")
        assert [host for *_, host, _ in upstream.seen] == [
            f"127.0.0.1:{proxy.port}",
            "bucket.example",
        ]

    @pytest.mark.parametrize("peeked", [False, True])
    def test_chunks_both_ways(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        peeked: bool,
    ) -> None:
        if peeked:
            proxy.reset(holding=b"never in there")
        parts = iter([BIG[:10], BIG[10:70_000], BIG[70_000:]])
        assert ask(client, "PUT", "/a?chunked", parts, Transfer_Encoding="chunked")[0] == 200
        assert upstream.objects["/a?chunked"] == BIG
        assert ask(client, "GET", "/a?chunked") == (200, BIG)
        assert ask(client, "GET", "/b")[0] == 404

    def test_a_body_that_ends_with_the_connection(
        self, upstream: Upstream, client: http.client.HTTPConnection
    ) -> None:
        upstream.objects["/a?close"] = BIG
        assert ask(client, "GET", "/a?close") == (200, BIG)
        assert ask(client, "GET", "/b")[0] == 404

    @pytest.mark.parametrize("peeked", [False, True])
    @pytest.mark.parametrize("copies", [1, 2])
    def test_expect_continue(
        self, upstream: Upstream, proxy: FaultyProxy, peeked: bool, copies: int
    ) -> None:
        if peeked:
            proxy.reset(holding=b"never in there")
        if copies == 2:
            proxy.duplicate()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as raw:
            raw.sendall(
                b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 100 ")
            raw.sendall(b"01234")
            file = raw.makefile("rb")
            while (line := file.readline()).startswith(b"HTTP/1.1 100 ") or not line.strip():
                assert line
            assert line.startswith(b"HTTP/1.1 200 ")
        assert [data for *_, data in upstream.seen] == [b"01234"] * copies

    def test_a_refusal_spares_the_body_that_was_to_follow(
        self, upstream: Upstream, proxy: FaultyProxy
    ) -> None:
        proxy.answer(403)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as raw:
            raw.sendall(
                b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 403 ")
            assert raw.recv(100) == b""
        assert upstream.seen == []

    def test_many_at_once(self, upstream: Upstream, proxy: FaultyProxy) -> None:
        def work(index: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
            for turn in range(5):
                path = f"/{index}/{turn}"
                assert ask(connection, "PUT", path, path.encode() * 10_000)[0] == 200
                assert ask(connection, "GET", path) == (200, path.encode() * 10_000)
            connection.close()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.status for r in proxy.requests] == [200] * 240

    def test_an_upstream_that_is_down(self, proxy: FaultyProxy, upstream: Upstream) -> None:
        upstream.shutdown()
        upstream.server_close()
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
        with pytest.raises(ConnectionError):
            ask(client, "GET", "/a")
        assert proxy.requests[0].status is None

    def test_it_ends_with_requests_under_way(self, upstream: Upstream) -> None:
        with FaultyProxy("127.0.0.1", upstream.server_port) as proxy:
            proxy.hang()
            client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
            client.request("GET", "/a")
            while not proxy.requests:
                time.sleep(0.01)
        with pytest.raises(ConnectionError):
            client.getresponse()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=1)


class TestFaults:
    def test_answering_by_itself(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.answer(429, "PUT", "/a", headers={"Retry-After": "7"}, body=b"calm down", times=2)
        for _ in range(2):
            client.request("PUT", "/a", BIG)
            response = client.getresponse()
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
            assert response.read() == b"calm down"
        assert upstream.seen == []
        assert ask(client, "PUT", "/a", BIG)[0] == 200
        assert [r.status for r in proxy.requests] == [429, 429, 200]
        assert [r.faults for r in proxy.requests] == [["answer 429"]] * 2 + [[]]

    def test_a_reset_in_place_of_the_request(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.reset("PUT")
        with pytest.raises(ConnectionError):
            ask(client, "PUT", "/a", b"x")
        client.close()
        assert upstream.seen == []
        assert ask(client, "PUT", "/a", b"x")[0] == 200

    def test_a_lost_response(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.lose("PUT")
        with pytest.raises(ConnectionError):
            ask(client, "PUT", "/a", BIG, If_None_Match="*")
        client.close()
        assert upstream.objects["/a"] == BIG
        assert ask(client, "PUT", "/a", BIG, If_None_Match="*")[0] == 412

    @pytest.mark.parametrize("peeked", [False, True])
    def test_a_duplicate(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        peeked: bool,
    ) -> None:
        proxy.duplicate("PUT", holding=BIG[:10] if peeked else b"")
        assert ask(client, "PUT", "/a", BIG, If_None_Match="*")[0] == 412
        assert [(method, data) for method, _, _, data in upstream.seen] == [("PUT", BIG)] * 2
        assert ask(client, "PUT", "/b", b"x", If_None_Match="*")[0] == 200

    @pytest.mark.parametrize("after", [0, 1, 100_000])
    def test_an_upload_cut_off(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        after: int,
    ) -> None:
        proxy.cut(after, "PUT")
        with pytest.raises(ConnectionError):
            ask(client, "PUT", "/a", BIG)
        client.close()
        assert "/a" not in upstream.objects
        assert proxy.requests[0].sent < len(BIG)
        assert ask(client, "PUT", "/a", BIG)[0] == 200

    @pytest.mark.parametrize("path", ["/a", "/a?chunked"])
    @pytest.mark.parametrize("at", [0, 65_536, 1_000_001])
    def test_a_flipped_bit(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        path: str,
        at: int,
    ) -> None:
        upstream.objects[path] = BIG
        proxy.corrupt("GET", at=at, times=1)
        assert ask(client, "GET", "/b") == (404, b"no such thing")  # spared
        status, found = ask(client, "GET", path)
        assert (status, len(found)) == (200, len(BIG))
        assert [i for i in range(len(BIG)) if found[i] != BIG[i]] == [at]
        assert found[at] == BIG[at] ^ 1
        assert ask(client, "GET", path) == (200, BIG)

    def test_a_flipped_bit_at_the_end(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        upstream.objects["/a"] = b"abc"
        proxy.corrupt("GET", at=-1)
        assert ask(client, "GET", "/a") == (200, b"abb")

    @pytest.mark.parametrize("path", ["/a", "/a?chunked"])
    @pytest.mark.parametrize("at", [0, 1, 70_000])
    def test_a_body_cut_short(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        path: str,
        at: int,
    ) -> None:
        upstream.objects[path] = BIG
        proxy.truncate("GET", at=at, times=1)
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(client, "GET", path)
        assert BIG[:at].startswith(caught.value.partial)
        assert proxy.requests[0].received == at
        client.close()
        assert ask(client, "GET", path) == (200, BIG)

    def test_a_slow_link_both_ways(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.slow(400_000)
        began = time.monotonic()
        ask(client, "PUT", "/a", BIG[:200_000])
        between = time.monotonic()
        assert ask(client, "GET", "/a") == (200, BIG[:200_000])
        assert 0.45 < between - began < 5
        assert 0.45 < time.monotonic() - between < 5

    @pytest.mark.parametrize("after", [False, True])
    def test_a_delay(
        self,
        upstream: Upstream,
        proxy: FaultyProxy,
        client: http.client.HTTPConnection,
        after: bool,
    ) -> None:
        proxy.delay(0.5, "PUT", after=after)
        client.request("PUT", "/a", b"x")
        time.sleep(0.25)
        assert ("/a" in upstream.objects) is after
        began = time.monotonic()
        assert client.getresponse().status == 200
        assert time.monotonic() - began > 0.2

    def test_no_answer_at_all(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.hang()
        client.timeout = 0.3
        with pytest.raises(TimeoutError):
            ask(client, "GET", "/a")
        client.close()
        assert upstream.seen == []
        assert ask(client, "GET", "/a")[0] == 404


class TestSchedules:
    def test_patterns_skips_and_times(
        self, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.answer(503, "GET", "/x/*", times=2, skip=1)
        assert proxy.unfired == ("answer 503 GET /x/*",)
        statuses = [ask(client, "GET", "/x/a?q=1")[0] for _ in range(4)]
        assert statuses == [404, 503, 503, 404]
        assert ask(client, "PUT", "/x/a")[0] == 200
        assert ask(client, "GET", "/y")[0] == 404
        assert not proxy.unfired

    def test_what_ends_a_request_leaves_the_rest_for_the_next(
        self, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.answer(500).answer(501)
        assert [ask(client, "GET", "/")[0] for _ in range(3)] == [500, 501, 404]

    def test_by_what_the_body_holds(
        self, upstream: Upstream, proxy: FaultyProxy, client: http.client.HTTPConnection
    ) -> None:
        proxy.answer(500, "POST", holding=b"commits/1")
        for key, status in (("deltas/1", 200), ("commits/1", 500), ("commits/1", 200)):
            body = json.dumps({"path": key}).encode() + BIG
            assert ask(client, "POST", "/batch", body)[0] == status
        assert [data for *_, data in upstream.seen] == [
            json.dumps({"path": key}).encode() + BIG for key in ("deltas/1", "commits/1")
        ]

    def test_healing(self, proxy: FaultyProxy, client: http.client.HTTPConnection) -> None:
        proxy.answer(500, times=None)
        assert [ask(client, "GET", "/")[0] for _ in range(3)] == [500] * 3
        proxy.heal()
        assert ask(client, "GET", "/")[0] == 404
        assert not proxy.unfired
        assert len(proxy.requests) == 4
