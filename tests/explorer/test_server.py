"""Who is answered, and with what."""

import http.client
import json
import threading
import time
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.errors import FileError
from embedlayer.explorer import server as explorer_server
from embedlayer.explorer.page_files import page_files
from embedlayer.explorer.server import HOST, address, make_server, to_json
from embedlayer.sources import OpenedModel


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


def test_the_page_comes_with_types_and_a_policy_that_lets_nothing_else_in(port):
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
    assert all(b"http://" not in text.replace(b"http://www.w3.org", b"") for text in page_files().values())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil"]
)
@pytest.mark.parametrize("path", ["/", "/data/manifest"])
def test_another_host_name_is_refused(port, host, path):
    answer, content = get(port, path, Host=host.format(port=port))
    assert answer.status == 403
    assert b"six" not in content


def test_localhost_is_this_machine_too(port):
    assert get(port, "/", Host=f"localhost:{port}")[0].status == 200


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/..%2fserver.py", "/%2e%2e/server.py", "/views/../../server.py", "//etc/passwd", "/etc/passwd",
     "/views/", "/page/index.html", "/..\\server.py", "/%00", "/style.css/", "/server.py"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(port, path):
    answer, content = get(port, path)
    assert answer.status == 404
    assert b"import" not in content
    assert b"root:" not in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_answered(port, method):
    assert get(port, "/data/manifest", method)[0].status == 501


def test_bad_questions_are_answered_with_sentences(port):
    for path, sentence in {
        "/data/nothing": "There is no data named 'nothing'",
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
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))


def test_the_server_listens_on_this_machine_alone_and_a_taken_port_is_an_error():
    with make_server([]) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert address(server).startswith("http://127.0.0.1:")
        with pytest.raises(FileError, match="Leave --port out"):
            make_server([], port=server.server_address[1])
    with pytest.raises(FileError, match="70000"):
        make_server([], port=70000)


def test_closed_it_has_no_thread_left_that_could_meet_the_end_of_python(monkeypatch, serving):
    begun, before = threading.Event(), set(threading.enumerate())

    def slow(*_):
        begun.set()
        return time.sleep(0.5)

    monkeypatch.setattr(explorer_server, "answer", slow)
    with ExitStack() as stack:
        with serving() as place:
            idle, asking = (
                stack.enter_context(closing(http.client.HTTPConnection(urlsplit(place).netloc, timeout=60)))
                for _ in range(2)
            )
            idle.request("GET", "/")
            idle.getresponse().read()
            asking.request("GET", "/data/manifest")
            assert begun.wait(60)
        assert set(threading.enumerate()) == before
