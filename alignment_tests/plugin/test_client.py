"""The client against URLs that are none and servers that are not SGLang: one sentence each, no traceback."""

import http.server
import threading
import urllib.request

import pytest

from minitransformer.errors import InputError
from minitransformer.plugins.sglang import client
from minitransformer.plugins.sglang.client import Client


@pytest.fixture
def answering():
    """A server that answers everything with .raw, the bytes of a whole HTTP answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.wfile.write(server.raw)
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def said(content: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


STRANGE = {
    "page": said(b"<html>", "text/html"), "list": said(b"[1, 2]"), "none": said(b"[]"), "empty": said(b""),
    "cut JSON": said(b"{nope"), "no text": said(b"\xff\xfe{"), "no fields": said(b"{}"),
    "no ranks": said(b'{"ranks": []}'),
    "no sums": said(b'{"ranks": [{"checksums": [1]}]}'), "no log-probs": said(b'{"meta_info": {}, "output_ids": []}'),
    "cut": said(b"{}")[:-1], "no HTTP": b"SSH-2.0-x\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_server_that_is_not_sglang(answering, name):
    answering.raw = STRANGE[name]
    client = Client(f"http://127.0.0.1:{answering.server_address[1]}", timeout=5)
    for ask in (client.about, client.identity, client.checksums, lambda: client.generate([[1, 2]], {})):
        with pytest.raises(InputError, match="SGLang server|no server answers"):
            ask()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:abc", "http://[::1", "http://127.0.0.1 :1", "http://127.0.0.1:1\n", "here", "", "http://",
        "http://:30000", "http://127.0.0.1:99999", "http://127.0.0.1:0", "ftp://127.0.0.1:1", "http://h:1?x=1",
        "http://h:1/#f", "http://h:1/a b", "http://h:1/a\tb",
    ],
)  # fmt: skip
def test_what_is_no_url(url):
    with pytest.raises(InputError, match="is no URL .*; expected http://host:port"):
        Client(url)


def test_a_password_is_not_repeated():
    with pytest.raises(InputError, match="more than a host, a port and a path") as told:
        Client("http://me:secret@127.0.0.1:30000")
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://h:1/under/a/path", "https://h", "http://[::1]:3/"])
def test_what_is_one(url):
    assert Client(url).url == url.rstrip("/")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_timeout_that_no_socket_takes(timeout):
    with pytest.raises(InputError, match="more than 0 and at most 1e"):
        Client("http://h:1", timeout)


def test_no_proxy_stands_before_a_server_of_this_machine(answering, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it knows the environment as it was
    answering.raw = said(b'{"a": 1}')
    assert Client(f"http://127.0.0.1:{answering.server_port}", timeout=20).call("/x") == {"a": 1}


def test_certificates_are_not_read_for_each_question(answering, monkeypatch):
    """One opener for all of them, another where the environment names other proxies."""
    made, make = [], urllib.request.build_opener
    monkeypatch.setattr(urllib.request, "build_opener", lambda *handlers: made.append(handlers) or make(*handlers))
    client._opener_for.cache_clear()
    for _ in range(3):
        answering.raw = said(b'{"a": 1}')
        assert Client(f"http://127.0.0.1:{answering.server_port}", timeout=20).call("/x") == {"a": 1}
    assert len(made) == 1
    for proxy in ("http://127.0.0.1:9", "http://127.0.0.1:9", "http://127.0.0.1:10"):
        monkeypatch.setenv("http_proxy", proxy)
        client._opener("http://elsewhere:1")
    assert len(made) == 3


def test_a_host_whose_name_no_resolver_takes():
    with pytest.raises(InputError, match="no server answers"):
        Client("http://" + "a" * 300, timeout=2).about()


@pytest.mark.parametrize("body, words", [
    (b'{"error": {"message": "too long", "code": 400}}', "too long"), (b'{"message": "no", "success": false}', "no"),
    (b'{"message": "2 faults:\\n  one\\n"}', "2 faults: one"),
    (b'{"error": "a text"}', '{"error": "a text"}'), (b"[1]", r"\[1\]"), (b"plain", "plain"), (b"", ""),
])  # fmt: skip
def test_a_refusal_is_told_in_the_servers_words(answering, body, words):
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answering.raw = head.encode() + body
    with pytest.raises(InputError, match=rf"refuses \(400\): {words}$"):
        Client(f"http://127.0.0.1:{answering.server_address[1]}", timeout=5).call("/x")


def test_a_refusal_that_breaks_off(answering):
    answering.raw = b"HTTP/1.1 500 X\r\nContent-Length: 100\r\n\r\nhalf"
    with pytest.raises(InputError, match=r"server_info: the server refuses \(500\): and breaks off"):
        Client(f"http://127.0.0.1:{answering.server_address[1]}", timeout=5).about()


@pytest.mark.parametrize("code, body, stock", [
    (404, b'{"detail": "Not Found"}', True), (400, b'{"message": "Unsupported action=\'identity\'"}', True),
    (400, b'{"message": "no"}', False), (401, b"", False), (500, b"Unsupported action", False), (503, b"", False),
])  # fmt: skip
def test_only_a_server_without_our_questions_is_stock(answering, code, body, stock):
    answering.raw = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    client = Client(f"http://127.0.0.1:{answering.server_address[1]}", timeout=5)
    if stock:
        assert client.identity() is None
    else:
        with pytest.raises(InputError, match=rf"weights_checker: the server refuses \({code}\)"):
            client.identity()


@pytest.mark.parametrize("code", [404, 405, 400, 401, 403, 500, 502, 503])
def test_a_refusal_is_no_other_server(answering, code):
    """A server that has no such page is none of SGLang's; a missing key or trouble is told as it is."""
    answering.raw = f"HTTP/1.1 {code} X\r\nContent-Length: 7\r\n\r\nnot now".encode()
    client = Client(f"http://127.0.0.1:{answering.server_address[1]}", timeout=5)
    told = "it is no SGLang server" if code in (404, 405) else rf"server_info: the server refuses \({code}\): not now$"
    with pytest.raises(InputError, match=told):
        client.about()
