"""Who is answered, and with what."""

import errno
import http.client
import json
import os
import shutil
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.server import ThreadingHTTPServer
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from explorer_requests import ACTS

import embedlayer as el
from embedlayer import TokenEmbedding
from embedlayer.compress import compress_table
from embedlayer.explorer.server import make_server
from embedlayer.opening import OpenedModel

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def port(serve):
    rows = torch.randn(6, 4)
    rows[2, 1] = torch.nan
    source = OpenedModel("six", TokenEmbedding.from_pretrained(rows), tokens=["a", "b", "c", "d", "e\ud800", ""])
    return int(serve(source).rsplit(":", 1)[1].strip("/"))


def get(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    headers = {"Host": f"{HOST}:{port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_page_comes_with_types_and_a_policy_that_lets_nothing_else_in(port, page_folder):
    kinds = {
        "/": "text/html",
        "/style.css": "text/css",
        "/app.js": "text/javascript",
        "/views/map.js": "text/javascript",
    }
    for path, kind in kinds.items():
        answer, content = get(port, path)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith(kind)
        assert len(content) == int(answer.headers["Content-Length"])
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    texts = [file.read_bytes() for file in page_folder.rglob("*.*")]
    assert all(b"http://" not in text.replace(b"http://www.w3.org", b"") for text in texts)


def test_only_the_names_of_this_machine_are_answered(port):
    for host in ("evil.example", "evil.example:{port}", HOST, f"{HOST}:1", "", "localhost.evil"):
        for path in ("/", "/data/manifest"):
            answer, content = get(port, path, Host=host.format(port=port))
            assert answer.status == 403
            assert b"six" not in content
    assert get(port, "/", Host=f"localhost:{port}")[0].status == 200


def test_no_path_leads_out_of_the_page(port):
    for path in (
        "/../server.py", "/..%2fserver.py", "/%2e%2e/server.py", "/views/../../server.py", "//etc/passwd",
        "/etc/passwd", "/views/", "/page/index.html", "/..\\server.py", "/%00", "/style.css/", "/server.py",
    ):  # fmt: skip
        answer, content = get(port, path)
        assert answer.status == 404, path
        assert b"import" not in content
        assert b"root:" not in content


@pytest.fixture(scope="module")
def names(port):
    """The names of all data, as an error lists them."""
    error = json.loads(get(port, "/data/nothing")[1])["error"]
    assert error.startswith("There is no data named 'nothing'")
    return ["manifest", *error.partition("; the names are ")[2].rstrip(".").split(", ")]


def test_every_route_takes_one_method_and_names_it_where_it_is_asked_with_another(port, names):
    assert len(names) > 30
    for name in ("", "style.css", *(f"data/{route}" for route in names)):
        allowed, other = ("POST", "GET") if name.removeprefix("data/") in ACTS else ("GET", "POST")
        answer, content = get(port, f"/{name}", other, Origin=f"http://{HOST}:{port}")
        assert (answer.status, answer.headers["Allow"]) == (405, allowed), name
        assert f"is requested with {allowed}" in json.loads(content)["error"]
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        assert get(port, "/data/manifest", method)[0].status == 501


@pytest.mark.parametrize("name", ACTS)
def test_only_the_page_itself_starts_and_ends_a_computation(port, name):
    own = [f"http://{HOST}:{port}", f"http://localhost:{port}"]
    for origin in (None, "null", "http://evil.example", f"https://{HOST}:{port}", f"http://{HOST}", own[0] + ".evil"):
        answer, content = get(port, f"/data/{name}", "POST", **({} if origin is None else {"Origin": origin}))
        assert answer.status == 403, origin
        assert b"Only the page" in content
    assert get(port, f"/data/{name}", "POST", Origin=own[0], Host=f"evil.example:{port}")[0].status == 403
    for origin in own:
        assert get(port, f"/data/{name}", "POST", Origin=origin)[0].status in (200, 400)


NUMBERS = "source other id ids plus minus count k appended text name cell position".split()
LINES = [
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1\r\n\r\n", b"\x00\xff\x16\x03\x01\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: %s\r\n\r\n", b"GET //[/data/tokens HTTP/1.1\r\nHost: %s\r\n\r\n",
    b"GET /%%ff%%00?%%ff=%%fe HTTP/1.1\r\nHost: %s\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n", b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: %s\r\nContent-Length: 4\r\n\r\nGET ",
    b"GET / HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]  # fmt: skip


def test_no_number_is_too_long(port, names, capfd):
    digits = "9" * 5000
    for name in {*names} - {*ACTS}:
        for params in ({}, *({number: digits} for number in NUMBERS), {"text": f"#{digits}", "plus": f"0,{digits}"}):
            answer, content = get(port, f"/data/{name}?{urlencode(params)}")
            assert answer.status in (200, 400), (name, params, content)
    assert capfd.readouterr().err == ""


def test_what_is_no_request_is_refused_and_the_next_is_answered(port, capfd):
    for line in LINES:
        with socket.create_connection((HOST, port), timeout=60) as connection:
            connection.sendall(line.replace(b"%s", f"{HOST}:{port}".encode()).replace(b"%%", b"%"))
            connection.shutdown(socket.SHUT_WR)
            said = b""
            with suppress(ConnectionResetError):  # the rest of a line that is too long was not read
                while block := connection.recv(1 << 16):
                    said += block
        assert b" 200 OK" not in said, line
        assert get(port, "/")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_connection_that_is_reset_is_forgotten_in_silence(capfd, serving):
    with serving(OpenedModel("large", TokenEmbedding(200_000, 4))) as place:
        host = urlsplit(place).netloc
        port = int(host.split(":")[1])
        request = f"GET /data/norms HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        for sent in (b"", b"GET / HT", request, 3 * request):
            with socket.create_connection((HOST, port), timeout=60) as connection:
                connection.sendall(sent)
                if len(sent) > 10:
                    connection.recv(100)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(port, "/")[0].status == 200
    assert capfd.readouterr().err == ""


def test_without_file_descriptors_the_server_waits_between_its_attempts(capfd, monkeypatch, serving):
    accept, full = ThreadingHTTPServer.get_request, [errno.EMFILE, errno.ENFILE, errno.EMFILE]
    pauses: list[float] = []

    def get_request(server):
        if full:
            raise OSError(full.pop(), "Too many open files")
        return accept(server)

    monkeypatch.setattr(ThreadingHTTPServer, "get_request", get_request)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with serving() as place:
        assert get(urlsplit(place).port, "/data/manifest")[0].status == 200
    assert pauses == [0.1] * 3
    assert capfd.readouterr().err == ""


def test_bad_questions_are_answered_with_sentences(port):
    for path, sentence in {
        "/data/tokens?source=3": "There is no source '3'",
        "/data/tokens?source=-1": "There is no source '-1'",
        "/data/neighbors?plus=17": "Token 17 is outside",
        "/data/neighbors?plus=dog": "list of at most 100 token IDs",
        "/data/neighbors": "needs at least one token ID",
        "/data/coordinates?count=99": "from 1 to 6",
        "/data/metrics": "has no metrics",
        "/data/compare?other=before": "is not a run",
        "/data/compare": "There is no source ''",
    }.items():
        answer, content = get(port, path)
        assert answer.status == 400
        assert sentence in json.loads(content)["error"]


def test_numbers_that_json_cannot_hold_stay_out_of_it(port):
    for path in ("/data/axes", "/data/neighbors?plus=0", "/data/health", "/data/spectrum", "/data/tokens"):
        answer, content = get(port, path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json"), content
        json.loads(content, parse_constant=lambda name: pytest.fail(name))


def test_the_server_listens_on_this_machine_alone_and_a_taken_port_is_an_error():
    with make_server([]) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(el.FileError, match="Leave --port out"):
            make_server([], port=server.server_address[1])
    with pytest.raises(el.FileError, match="70000"):
        make_server([], port=70000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of which every tensor is mapped, quantised or not."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    tokenizer = el.train_tokenizer("the cat sat on the mat . " * 40, vocab_size=280)
    model = el.DecoderLM(TokenEmbedding(tokenizer.get_vocab_size(), 32), "rotary", num_layers=1, num_heads=2)
    model.save_pretrained(folder / "dense", tokenizer=tokenizer)
    compress_table(model.table, "int8").save_pretrained(folder / "int8", tokenizer=tokenizer)
    return folder


def every_answer(port, names):
    """Status and content of the answer of each route."""
    params = urlencode({"text": "the cat", "plus": "1", "ids": "1,2", "id": "1", "other": "0", "k": "2"})
    answers = {name: get(port, f"/data/{name}?{params}") for name in names if name not in ACTS}
    return {name: (answer.status, content) for name, (answer, content) in answers.items()}


@pytest.mark.parametrize("kind", ["dense", "int8"])
@pytest.mark.parametrize("is_large", [False, True], ids=["in memory", "mapped"])
def test_a_file_that_is_written_again_while_it_is_served_ends_nothing(
    kind, is_large, names, checkpoint, tmp_path, monkeypatch, serving
) -> None:
    """What is mapped would end the process by SIGBUS; each row is that of the old file, or an error names the file."""
    if is_large:
        monkeypatch.setattr(os, "sysconf", lambda name: 1)  # of memory, one byte
    folder = shutil.copytree(checkpoint / kind, tmp_path / kind)
    with serving(el.open_model(folder)) as place:
        expected = every_answer(urlsplit(place).port, names)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for how in ("replaced", "truncated", "written again"):
        with serving(el.open_model(folder)) as place:
            if how == "replaced":
                (tmp_path / "next").write_bytes(content)
                os.replace(tmp_path / "next", file)
            else:
                file.open("wb").close()
                file.write_bytes(content if how == "written again" else b"")
            answers = every_answer(urlsplit(place).port, names)
        file.write_bytes(content)
        for name, (status, said) in answers.items():
            if how == "replaced" or (not is_large and name != "tensors"):
                assert (status, said) == expected[name], name
            elif is_large or status != 200:  # "tensors" reads the file at each request
                assert status == 400, name
                assert json.loads(said)["error"].startswith(f"{file} ")


def test_many_requests_at_once_are_all_answered(port) -> None:
    with make_server([]) as server:
        assert server.request_queue_size > 100 > ThreadingHTTPServer.request_queue_size
    with ThreadPoolExecutor(100) as pool:
        statuses = list(pool.map(lambda number: get(port, f"/data/pipeline?text=a{number}")[0].status, range(200)))
    assert {*statuses} <= {200, 400}


def test_closed_it_has_no_thread_left_that_could_meet_the_end_of_python(serving):
    begun, before = threading.Event(), set(threading.enumerate())

    class Slow(TokenEmbedding):
        def rows(self, start, stop):
            begun.set()
            time.sleep(0.5)
            return super().rows(start, stop)

    with ExitStack() as stack:
        with serving(OpenedModel("slow", Slow(4, 2))) as place:
            idle, asking = (
                stack.enter_context(closing(http.client.HTTPConnection(urlsplit(place).netloc, timeout=60)))
                for _ in range(2)
            )
            idle.request("GET", "/")
            idle.getresponse().read()
            asking.request("GET", "/data/norms")
            assert begun.wait(60)
        assert set(threading.enumerate()) == before
