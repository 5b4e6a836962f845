"""`embedlayer vocab`, end to end."""

import json
import re
import shutil

import pytest
import torch
from commands import answer, leave_out_answers, printed, refused, run
from covering import some

import embedlayer as el

SMALL = "--dim 32 --heads 2 --layers 1 --length 32 --batch-size 4 --vocab-size 400 --log-every 5 --steps 5".split()
SMALL += ["--validation-fraction", "0.05"]
TERMS = ("otterly", "lynxes", "quokka")


@pytest.fixture(scope="module")
def trained(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(reference[:20_000])
    assert run("train", folder / "text.txt", "-o", folder / "run", *SMALL) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def domain(tmp_path_factory):
    """Text in which the terms stand, and a file that names them."""
    folder = tmp_path_factory.mktemp("domain")
    line = "the otterly saw lynxes and the quokka saw the otterly ; lynxes and quokka are objects .\n"
    (folder / "text.txt").write_text(line * 50)
    (folder / "terms.txt").write_text("\n".join(TERMS) + "\n\n the\n")
    return folder


def test_new_terms_are_trained_alone_and_all_else_stays_to_the_bit(
    reference, trained, domain, tmp_path, capsys, monkeypatch
) -> None:
    """The whole story: terms into a trained run, only their rows trained, their text costs less, nothing else moved."""
    command = ["vocab", "add", trained, "--terms", domain / "terms.txt", "-o", tmp_path / "new"]
    options = ["--train-on", domain / "text.txt", "--steps", 12, "--learning-rate", 0.05, "--json"]
    assert run(*command, *options) == 0
    said = capsys.readouterr()
    assert "Already tokens, and left unchanged (1): ' the'" in said.err
    result = json.loads(said.out)
    size = result["tokens"][0]
    assert result["tokens"] == result["rows"] == [size, size + 3]
    assert result["kept"] == size
    assert [text for text, _ in result["added"].values()] == [f" {term}" for term in TERMS]
    assert all(words.startswith("trained from subword mean of ") for _, words in result["added"].values())
    assert (result["new_tokens_in_text"], result["different_new_tokens_in_text"]) == (300, 3)
    assert result["loss_after_training"] < result["loss_before_training"]
    assert result["loss_after_training"] < result["loss_with_old_tokens"]

    one, other = el.open_model(trained), el.open_model(tmp_path / "new")
    before, old, after, new = one.model, one.tokenizer, other.model, other.tokenizer
    text = reference[:300]
    assert new.encode(text).ids == old.encode(text).ids
    ids = torch.tensor(old.encode(text).ids[:32])
    assert torch.equal(after.hidden(ids), before.hidden(ids))
    torch.testing.assert_close(after(ids)[:, :size], before(ids), rtol=1e-6, atol=1e-6)
    assert torch.equal(after.table.weight[:size], before.table.weight)
    others = before.state_dict()
    assert all(
        torch.equal(tensor, others[name]) for name, tensor in after.state_dict().items() if name != "table.weight"
    )
    trainer, _, _ = el.RunDirectory(tmp_path / "new").resume()
    assert torch.equal(trainer.model.table.weight, after.table.weight)

    assert answer("embed", tmp_path / "new", "the otterly")["tokens"][-1] == " otterly"
    leave_out_answers(monkeypatch)
    assert run("report", tmp_path / "new") == 0


@pytest.mark.parametrize("tied", some([False], [False, True]))
def test_new_rows_of_a_checkpoint_of_transformers_are_trained_too(tied, domain, tmp_path, unchecked) -> None:
    from safetensors.torch import load_file
    from tiny_models import build

    source, new = tmp_path / "source", tmp_path / "new"
    build("qwen3", "causal", {"vocab_size": 257, "tie_word_embeddings": tied})[1].save_pretrained(source)
    el.train_tokenizer((), "byte").save(str(source / "tokenizer.json"))
    options = ["--train-on", domain / "text.txt", "--steps", 3, "--learning-rate", 0.05]
    result = answer("vocab", "add", source, *TERMS, "-o", new, *options)
    assert result["tokens"] == [257, 260]
    assert result["loss_after_training"] < result["loss_before_training"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, new))
    rows = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor)
        assert (len(after[name]) == 260) == (name in rows)
    plain = tmp_path / "plain"
    assert run("vocab", "add", source, *TERMS, "-o", plain) == 0
    untrained = load_file(plain / "model.safetensors")
    assert all((after[name][257:] != untrained[name][257:]).any(1).all() for name in rows)


def test_what_happened_is_shown(trained, tmp_path) -> None:
    shown = printed("vocab", "add", trained, *TERMS, "--special", "<|user|>", "-o", tmp_path / "new", "--init", "mean")
    assert re.search(r"\nInit +4 from the mean of all rows\n", shown)
    assert re.search(r"Tokens +400 -> 404\nRows +400 -> 404\nKept +400, unchanged bit for bit\nNew +4\n", shown)
    assert re.search(r" 400  ·otterly +mean\n", shown)
    assert re.search(r"Bytes +[\d,]+ -> [\d,]+ of weights \(\d+ more\)", shown)
    new = tmp_path / "new"
    assert shown.endswith(f"\nWritten to {new}\n{trained} is unchanged; to undo, delete {new}.\n")
    shown = printed("vocab", "remove", tmp_path / "new", " otterly", "#403", "-o", tmp_path / "less")
    assert re.search(r"Dropped +2\n +400  ·otterly\n +403  <\|user\|>\n", shown)


def test_trimming_and_transplanting_from_the_command_line(trained, domain, tmp_path, capsys) -> None:
    capsys.readouterr()
    assert run("vocab", "trim", trained, domain / "text.txt", "-o", tmp_path / "small", "--json") == 0
    said = capsys.readouterr()
    assert "no run to resume" in said.err
    trimmed = json.loads(said.out)
    assert trimmed["tokens"][1] < trimmed["tokens"][0] == 400
    assert trimmed["weight_bytes"][1] < trimmed["weight_bytes"][0]
    assert run("generate", tmp_path / "small", "the", "--tokens", 3) == 0
    (domain / "vocab").mkdir(exist_ok=True)
    tokenizer = el.train_tokenizer((domain / "text.txt").read_text(), "word")
    tokenizer.save(str(domain / "vocab" / "tokenizer.json"))
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "corpus")
    (tmp_path / "run" / "run.json").unlink()
    moved = answer("vocab", "transplant", tmp_path / "run", domain / "vocab", "-o", tmp_path / "moved")
    assert moved["tokens"] == [400, tokenizer.get_vocab_size()]
    assert el.open_model(tmp_path / "moved").tokenizer.encode("the quokka").tokens == ["the", "quokka"]


def test_rows_start_from_a_donor_or_from_word_vectors(trained, domain, tmp_path) -> None:
    words = el.train_tokenizer((domain / "text.txt").read_text(), "word")
    el.TokenEmbedding(words.get_vocab_size(), 16).save_pretrained(tmp_path / "donor", tokenizer=words)
    tokens = ["the", "objects", "otterly", "lynxes"]
    el.checkpoints.write_vectors(tmp_path / "words.vec", tokens, el.TokenEmbedding(4, 8))
    for name, options, method in [
        ("a", ["--init", "omp", "--donor", tmp_path / "donor"], "OMP of "),
        ("b", ["--init", "focus", "--auxiliary", tmp_path / "words.vec"], "FOCUS of "),
        ("c", ["--init", "wechsel", "--train-on", domain / "text.txt", "--steps", 1], "trained from WECHSEL of "),
    ]:
        added = answer("vocab", "add", trained, "otterly", "lynxes", "-o", tmp_path / name, *options)["added"]
        assert [text for text, _ in added.values()] == [" otterly", " lynxes"]
        assert all(words.startswith(method) for _, words in added.values())
    words.save(str(tmp_path / "words.json"))
    moved = ["vocab", "transplant", trained, tmp_path / "words.json", "-o", tmp_path / "d", "--init", "wechsel"]
    origins = [how for _, how in answer(*moved, "--auxiliary-text", domain / "text.txt")["added"].values()]
    assert any(how.startswith("WECHSEL of ") for how in origins)


@pytest.mark.parametrize("prune", [False, True])
def test_a_suggested_list_is_what_add_and_remove_take(trained, domain, prune, tmp_path) -> None:
    text = domain / "text.txt"
    command = ["vocab", "suggest", trained, text, "--count", 9, *["--prune"] * prune, "-o", tmp_path / "list"]
    suggested = answer(*command)
    assert suggested["lines"] == (tmp_path / "list").read_text().splitlines()
    assert (suggested["after"]["bytes_per_token"] > suggested["before"]["bytes_per_token"]) is not prune
    option = ["remove", trained, "--tokens"] if prune else ["add", trained, "--terms"]
    assert run("vocab", *option, tmp_path / "list", "-o", tmp_path / "new") == 0
    assert f"{tmp_path / 'list'} exists. Remove it" in refused(*command, "--held-out", text, code=1)
    (tmp_path / "list").unlink()
    said = printed(*command, "--held-out", text)
    assert f"next: embedlayer vocab {option[0]} {trained} {option[2]} {tmp_path / 'list'} -o ..." in said
    edited = el.open_model(tmp_path / "new").tokenizer
    tokens = len(edited.encode(text.read_text(), add_special_tokens=False))
    assert f"-> {tokens:,} for it" in said


def test_two_tokenizers_and_two_models_are_compared(reference, trained, tmp_path) -> None:
    """Alone, on a text, and with the bits per byte that `evaluate` prints where both have a model."""
    text = tmp_path / "text.txt"
    text.write_text(reference[20_000:22_000])
    letters = el.train_tokenizer((), "byte")
    table = el.TokenEmbedding(letters.get_vocab_size(), 16)
    model = el.DecoderLM(table, el.RotaryEmbedding(8), num_layers=1, num_heads=2)
    model.save_pretrained(tmp_path / "letters", tokenizer=letters)
    alone = answer("vocab", "compare", trained, tmp_path / "letters")
    assert (alone["b"]["num_tokens"], alone["b"]["path"], alone["one_to_one"]) == (257, str(tmp_path / "letters"), None)
    both = answer("vocab", "compare", trained, tmp_path / "letters", "--text", text)
    scores = answer("evaluate", trained, tmp_path / "letters", "--text", text)
    assert both["a"]["bits_per_byte"] == scores["model"]["bits_per_byte"]
    assert both["b"]["bits_per_byte"] == scores["other"]["bits_per_byte"]
    assert both["b"]["text_tokens"] == both["num_bytes"] == len(text.read_bytes())
    assert (both["inexact"], both["no_bits_per_byte"]) == (0, "")
    shown = printed("vocab", "compare", trained, tmp_path / "letters", "--text", text)
    assert all(f"{scores[name]['bits_per_byte']:.4f}" in shown for name in ("model", "other"))
    assert f"{both['one_to_one']:.1%} of the chunks are one token on each side" in shown
    shown = " ".join(
        printed("vocab", "compare", trained / "tokenizer.json", tmp_path / "letters", "--text", text).split()
    )
    assert f"No bits per byte: {trained / 'tokenizer.json'} is a tokenizer" in shown
    el.TokenEmbedding(257, 8).save_pretrained(tmp_path / "table", tokenizer=letters)
    found = answer("vocab", "compare", trained, tmp_path / "table", "--text", text)
    assert "has no transformer blocks" in found["no_bits_per_byte"]
