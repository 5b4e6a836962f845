"""The report of a folder names what an edit moves there: the same tensors, files and refusals, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import answer, printed
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import embedlayer as el
from embedlayer.tokenization import save_tokenizer

V, D = 280, 8
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENIZER = el.train_tokenizer("the small dog loved other small dogs. " * 30, vocab_size=V)


def layer(folder: Path) -> None:
    el.EmbeddingLayer(el.TokenEmbedding(V, D, padding_idx=3)).save_pretrained(folder, tokenizer=TOKENIZER)


def decoder(folder: Path) -> None:
    head = el.OutputHead(vocab_size=V, embed_dim=D, bias=True)
    table = el.TokenEmbedding(V, D, pad_to_multiple_of=64)
    model = el.DecoderLM(table, "learned", head, num_layers=1, num_heads=1, max_seq_len=V)
    model.save_pretrained(folder, tokenizer=TOKENIZER)


def checkpoint(folder: Path) -> None:
    folder.mkdir()
    weights = {TABLE: torch.randn(V, D), HEAD: torch.randn(V, D), "model.norm.weight": torch.ones(D)}
    save_file(weights, folder / "model.safetensors")
    save_file({name: each.half() for name, each in weights.items()}, folder / "model.fp16.safetensors")
    sizes = {"hidden_size": D, "num_attention_heads": 2, "vocab_size": V}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, "eos_token_id": 270}))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [270, 271], "suppress_tokens": [275], "top_k": 270})
    )
    save_tokenizer(TOKENIZER, folder / "tokenizer.json")
    (folder / "vocab.txt").write_text("an older form")
    (folder / "notes.txt").write_text("kept")


FOLDERS: dict[str, Callable[[Path], None]] = {"layer": layer, "decoder": decoder, "checkpoint": checkpoint}


def report_of(folder: Path) -> Any:
    """Return the part of a plan that says what follows the vocabulary of a folder."""
    return answer("plan", "--checkpoint", folder)[0]["vocabulary"]


pytestmark = pytest.mark.filterwarnings("ignore:.*only its|.*blocks:embedlayer.EmbedLayerWarning")


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        start = "" if file.name == "model.safetensors" else f"{file.name}/"
        with safe_open(file, framework="pt") as weights:
            found |= {f"{start}{name}": tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return found


def entries(content: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {name: content}
    return {key: value for own, each in content.items() for key, value in entries(each, f"{name}.{own}").items()}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_report_names_what_an_edit_changes(kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "old", tmp_path / "new"
    FOLDERS[kind](folder)
    for name in ("optimizer.pt", "scheduler.pt", "model.onnx"):
        (folder / name).write_bytes(b"of the old vocabulary")
    report = report_of(folder)
    assert (report["refused"], report["notes"]) == ("", [])
    with pytest.warns(el.EmbedLayerWarning, match="Left out"):
        receipt = el.vocab.remove_tokens(folder, ["Ġdog"], out=out, pad_to_multiple_of=1)
    before, after = shapes_in(folder), shapes_in(out)
    assert report["tensors"] == {name: [*shape] for name, shape in before.items() if after[name] != shape}
    assert tuple(report["left_out"]) == receipt.left_out == ("model.onnx", "optimizer.pt")
    files = {file.name for file in folder.iterdir() if file.suffix != ".safetensors"} - report["left_out"].keys()
    same = {
        name for name in files if (out / name).exists() and (out / name).read_bytes() == (folder / name).read_bytes()
    }
    assert files - same <= {*report["files"]}
    if kind == "checkpoint":
        moved = set()
        for name in ("config.json", "generation_config.json"):
            old, new = (entries(json.loads((each / name).read_text())) for each in (folder, out))
            moved |= {f"{name}: {key[1:]}" for key in old if old[key] != new[key] and key != ".vocab_size"}
        assert {*report["token_ids"]} == moved
    else:
        assert [*report["token_ids"].values()] == [3] * len(report["token_ids"])
        assert bool(report["token_ids"]) == (kind == "layer")


REFUSED: dict[str, dict[str, torch.Tensor]] = {
    "extra.safetensors": {"unknown.weight": torch.zeros(V, 2)},
    "adapter_model.safetensors": {"base_model.model.lm_head.lora_embedding_A": torch.zeros(2, V)},
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_report_says_why_an_edit_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    FOLDERS[kind](folder)

    def check(error: type[Exception] | tuple[type[Exception], ...]) -> None:
        with pytest.raises(error) as caught:
            el.vocab.remove_tokens(folder, ["Ġdog"], out=tmp_path / "new")
        assert report_of(folder)["refused"] == str(caught.value)

    for name, tensors in REFUSED.items():
        save_file(tensors, folder / name)
        check(el.CheckpointError)
        (folder / name).unlink()
    file = folder / "tokenizer.json"
    longer = Tokenizer.from_str(TOKENIZER.to_str())
    longer.add_tokens([f"<{number}>" for number in range(longer.get_vocab_size(), V + 2)])
    save_tokenizer(longer, file)
    report = report_of(folder)
    (note,) = report["notes"]
    assert (report["refused"], "2 tokens have none" in note, f"vocab add {folder} -o ..." in note) == ("", True, True)
    save_tokenizer(Tokenizer(WordLevel({f"word{n}": n for n in range(V + 50)}, unk_token="word0")), file)
    check((el.TokenizerError, el.VocabularyError))
    file.write_text('{"model": {"type": "Unknown"}}')
    check((el.TokenizerError, el.VocabularyError))


def test_an_unknown_key_is_a_refusal_and_a_tensor_that_may_belong_to_tokens_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    checkpoint(folder)
    save_file({TABLE: torch.randn(V, D), "prior.weight": torch.randn(V)}, folder / "model.safetensors")
    (folder / "model.fp16.safetensors").unlink()
    report = report_of(folder)
    assert report["refused"] == ""
    assert "prior.weight has 280 rows" in report["notes"][0]
    (folder / "generation_config.json").write_text(json.dumps({"call_id": 7}))
    assert "generation_config.json has call_id = 7" in report_of(folder)["refused"]


def test_plan_prints_the_report_in_80_columns(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    checkpoint(folder)
    (folder / "optimizer.pt").write_bytes(b"of the old vocabulary")
    ids = {f"{name}_token_id": 10 + place for place, name in enumerate("bos pad sep cls mask decoder_start".split())}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    text = printed("plan", "--checkpoint", folder)
    assert f"tensors    {TABLE} (280 x 8), {HEAD} (280 x 8), " in text
    assert "token IDs  config.json: eos_token_id = 270\n" in text
    assert "\n           generation_config.json: eos_token_id = [270, 271], suppress_tokens =" in text
    assert "left out   optimizer.pt (state of an optimizer)" in text
    assert all(f"{name} = {value}" in text for name, value in ids.items())
    assert text.count("generation_config.json: ") == 1
    assert max(map(len, text[text.index("token IDs") :].splitlines())) <= 80
