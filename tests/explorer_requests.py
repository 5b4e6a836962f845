"""Requests to the explorer's server, as the page sends them, and the answers that an exported page holds."""

import base64
import gzip
import http.client
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import torch
from torch import Tensor

from embedlayer.opening import OpenedModel

ACTS = ("layout-start", "layout-cancel")


class Refused(Exception):
    """The server has refused a request, with a sentence."""


def numbers(content: bytes, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of an answer in bytes."""
    values = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return values.view(*shape or (-1,))


def unpacked(content: dict[str, Any]) -> Any:
    """A packed tensor as a tensor; other objects of JSON as they are."""
    if content.keys() != {"shape", "float32"}:
        return content
    return numbers(base64.b64decode(content["float32"]), *content["shape"])


class Server:
    """A running server that answers about other sources at each request."""

    def __init__(self, address: str, sources: list[OpenedModel]) -> None:
        self.host, self.sources = urlsplit(address).netloc, sources

    def raw(self, about: OpenedModel | list[OpenedModel], name: str, /, **params: object) -> Any:
        """The answer about a source, or about the first of several: bytes, or what JSON holds."""
        content = self._content(about, name, params)
        return content if isinstance(content, bytes) else json.loads(content)

    def __call__(self, about: OpenedModel | list[OpenedModel], name: str, /, **params: object) -> Any:
        """As `raw`, with tensors."""
        content = self._content(about, name, params)
        return content if isinstance(content, bytes) else json.loads(content, object_hook=unpacked)

    def _content(self, about: OpenedModel | list[OpenedModel], name: str, params: dict[str, object]) -> bytes | str:
        self.sources[:] = about if isinstance(about, list) else [about]
        query, method = urlencode(params, errors="surrogatepass"), "POST" if name in ACTS else "GET"
        with closing(http.client.HTTPConnection(self.host, timeout=60)) as connection:
            connection.request(method, f"/data/{name}?{query}", headers={"Origin": f"http://{self.host}"})
            answer = connection.getresponse()
            content = answer.read()
        if answer.status == 400:
            raise Refused(json.loads(content)["error"])
        assert answer.status == 200, (name, params, content)
        return content if answer.headers["Content-Type"] == "application/octet-stream" else content.decode()


def steps_of(answer: Any) -> dict[str, Any]:
    """The steps of an answer of the route `pipeline`, by name."""
    return {step["name"]: step for step in answer["steps"]}


def ids_of(answer: Any) -> Tensor:
    """The token IDs of an answer with tokens."""
    return torch.tensor([token["id"] for token in answer["tokens"]])


def stored_answers(page: Path | str) -> dict[str, Any]:
    """The answers in an exported page, by request."""
    text = Path(str(page).removeprefix("file://")).read_text(encoding="utf-8")
    content = json.loads(re.search(r'id="answers">(.*?)</script>', text, flags=re.S)[1])
    return {
        request: each["json"] if "json" in each else gzip.decompress(base64.b64decode(each["base64"]))
        for request, each in content.items()
    }


def request(name: str, **params: str) -> str:
    """The request under which an exported page holds its answer."""
    query = urlencode(sorted(params.items()), quote_via=quote, safe="!~*'()")
    return f"{name}?{query}" if query else name
