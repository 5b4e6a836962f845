"""The reader of checkpoints: by what they are opened."""

import socket
import sys

import pytest
import torch
from commands import run
from safetensors.torch import save_file

import embedlayer as el


def test_a_folder_a_file_and_an_index_are_the_same_checkpoint(tmp_path) -> None:
    save_file({"wte.weight": torch.ones(3, 2), "wpe.weight": torch.ones(4, 2)}, tmp_path / "rows.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"wte.weight": "rows.safetensors", "wpe.weight": "rows.safetensors"}}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for wanted in (".", "rows.safetensors", "model.safetensors.index.json"):
        layer = el.load(tmp_path / wanted)
        assert (layer.family, layer.table.weight.sum(), layer.tokenizer) == ("gpt2", 6, None)


def test_what_is_not_there_is_a_file_error(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("no/such/folder", "nothing here", "a" * 5000, "a\0b"):
        with pytest.raises(el.FileError):
            el.load(source)


def test_a_name_on_the_hub_is_found_in_the_cache_offline(tmp_path, monkeypatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    save_file({"wte.weight": torch.ones(257, 2), "wpe.weight": torch.ones(4, 2)}, repository / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    el.train_tokenizer((), "byte").save(str(snapshot / "tokenizer.json"))
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    layer = el.load("someone/tiny")
    assert (layer.family, layer.table.weight.sum(), layer.report().tokenizer) == ("gpt2", 514, 257)
    for name, revision in (("someone/else", None), ("someone/tiny", "v2")):
        with pytest.raises(el.FileError, match="cache"):
            el.load(name, revision=revision)


def test_without_the_extra_a_mistyped_path_is_still_said_not_to_be_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(el.MissingExtraError, match=r"'some/where'(.|\n)*pip install"):
        el.load("some/where")


MISTYPED = [
    *("out/demoo", "out/demoo/model", "./demoo", "../demoo", "/demoo/a", "~/demoo", "~demoo/a", "demoo", "demoo.txt"),
    *("demoo/model.safetensors", "demoo/vectors.txt", "demoo/vectors.vec.gz", "demoo/config.json", "demoo/"),
    *("C:\\demoo", "runs\\demoo", "demoo/ä", "a" * 60 + "/" + "b" * 60),
]


def test_a_mistyped_path_is_an_error_at_once_and_never_looked_for_on_the_hub(tmp_path, monkeypatch, capsys) -> None:
    def connect(*arguments: object, **options: object) -> None:
        raise AssertionError("somebody asked the network")

    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, connect)
    for source in MISTYPED:
        for opens in (el.load, el.open_model):
            with pytest.raises(el.FileError, match="There is no folder or file|Cannot read"):
                opens(source)
        assert run("inspect", source) == 1
        assert capsys.readouterr().err.startswith("FileError: ")


def test_a_hub_that_cannot_be_reached_is_an_error_at_once(tmp_path, monkeypatch) -> None:
    """The client of the hub would try for half a minute for each file; what is in its cache still opens."""
    asked = []

    def connect(address: object, timeout: float) -> None:
        asked.append((address, timeout))
        raise OSError("Network is unreachable")

    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", connect)
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    with pytest.raises(el.FileError, match="Network is unreachable"):
        el.load("some/where")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    with pytest.raises(el.FileError):
        el.load("some/where")
    assert [address for address, _ in asked] == [("hub.example", 443), ("proxy.example", 3128)]
