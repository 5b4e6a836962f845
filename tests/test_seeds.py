"""The code of the lessons that this library implements runs with its classes.

The lessons are texts without indentation, in which prose follows code on the same line. Each block is named by its
lines; indentation is restored by Python's own rules, and where a block of code ends without a sign, by the line numbers
in `DEDENTS`.
"""

import ast
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from covering import some
from tokenizers import Tokenizer

import embedlayer as el

SEEDS = Path(__file__).resolve().parents[2] / "shared" / "seeds"

LINEAR, LESSON, NOTEBOOK, LLAMA = (
    "000_5be0eb023fdab4bf.txt",
    "001_7a1e34b0a4ed1aa5.txt",
    "002_100df8b82d665979.txt",
    "003_99aeba3dc7db95fc.txt",
)

BLOCKS = {
    LINEAR: [
        (6, 7), (15, 24), (26, 30), (32, 32), (39, 39), (45, 45), (50, 51), (62, 63), (70, 72), (82, 82), (84, 84)
    ],
    LESSON: [
        (52, 93), (94, 107), (109, 119), (128, 171), (173, 184), (192, 231), (233, 265), (266, 286), (293, 294),
        (298, 300), (308, 311), (320, 324), (326, 345), (350, 392), (403, 465), (467, 499), (500, 521), (538, 553),
        (556, 569), (571, 586), (588, 606), (608, 621),
    ],
}  # fmt: skip
"""First and last line of each block of code."""

DEDENTS = {77: 2, 114: 0, 143: 2, 156: 2, 171: 0, 231: 0, 376: 0, 479: 1, 483: 0, 512: 0, 516: 0, 569: 0}
"""Lines of LESSON that follow a loop or a `with`, and how deep they stand."""

POSITION_TABLES = ("pos_emb", "position_embedding", "pos_embedding_layer", "learned")
"""What the lessons call an `nn.Embedding` whose rows are positions."""


OURS = {
    name: getattr(el.lessons if name.startswith(("Scratch", "GPT")) else el, name)
    for name in (
        "ScratchEmbedding",
        "ScratchEmbeddingWithGrad",
        "ScratchPositionEmbedding",
        "ScratchCombinedEmbedding",
        "TransformerEmbedding",
        "GPTEmbedding",
    )
}
"""Classes that the lessons write and that this library has under the same name."""


@pytest.fixture(scope="module")
def seeds() -> Path:
    if not SEEDS.is_dir():
        pytest.skip(f"the lessons at {SEEDS} are not on this machine")
    return SEEDS


@pytest.fixture(scope="module")
def gpt2(shared_data) -> Tokenizer:
    return el.load_tokenizer(shared_data / "tokenizers" / "gpt2-encoder.json")


def restored(lines: dict[int, str]) -> str:
    """The lines with their indentation."""
    depth, in_class, in_text, previous, result = 0, False, False, "", []
    last = max(lines)
    for number, line in lines.items():
        if previous.endswith(":") and not in_text:
            depth += 1
        if line.startswith("class "):
            depth, in_class = 0, True
        elif line.startswith("def "):
            depth = int(in_class)
        elif previous.startswith("return "):
            depth, in_class = 0, False
        depth = DEDENTS.get(number, depth)
        text = line if number != last else line[: len(line) - len(trailing_prose(line))]
        result.append("    " * depth + text)
        in_text ^= line.count('"""') % 2 == 1
        previous = line if not in_text else ""
    return "\n".join(result)


def trailing_prose(line: str) -> str:
    """What follows the closing bracket of a block's last line, if a letter does."""
    match = re.search(r"\)(?=[A-Z2][\w’:]+( |$))", line)
    return line[match.end() :] if match else ""


class WithOurs(ast.NodeTransformer):
    """Put our classes in the place of `nn.Embedding` and of the layer that maps back to the vocabulary."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = ast.unparse(node.targets[0]).removeprefix("self.")
        if isinstance(node.value, ast.Call):
            function = ast.unparse(node.value.func).removeprefix("torch.")
            if function == "nn.Embedding":
                is_position = target in POSITION_TABLES
                name = "LearnedPositionalEmbedding" if is_position else "TokenEmbedding"
                node.value.func = ast.Attribute(ast.Name("el", ast.Load()), name, ast.Load())
            elif function == "nn.Linear" and target == "output_proj":
                node.value.func = ast.Attribute(ast.Name("el", ast.Load()), "OutputHead", ast.Load())
        return node


def run(code: str, names: dict[str, Any], ours: bool) -> None:
    """Execute code with our classes for torch's; with `ours`, also for those that the code defines itself."""
    tree = ast.fix_missing_locations(WithOurs().visit(ast.parse(code)))
    for statement in tree.body:
        if ours and isinstance(statement, ast.ClassDef) and statement.name in OURS:
            names[statement.name] = OURS[statement.name]
        else:
            exec(compile(ast.Module([statement], []), "<lesson>", "exec"), names)


def blocks_of(seeds: Path, name: str) -> list[str]:
    lines = dict(enumerate((seeds / name).read_text().splitlines(), start=1))
    return [restored({number: lines[number] for number in range(first, last + 1)}) for first, last in BLOCKS[name]]


def cells_of(seeds: Path) -> list[str]:
    return re.findall(r"In \[None\]:\n(.*?)(?:\n\n\n|\Z)", (seeds / NOTEBOOK).read_text(), flags=re.S)


@pytest.fixture
def pictures(monkeypatch):
    """matplotlib without a window."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    yield
    pyplot.close("all")


def test_no_line_of_code_is_left_out(seeds) -> None:
    """Every line that parses as an assignment, a call, an import or a definition is in a block."""
    for name, blocks in BLOCKS.items():
        covered = {number for first, last in blocks for number in range(first, last + 1)}
        for number, line in enumerate((seeds / name).read_text().splitlines(), start=1):
            is_code = re.match(
                r"import |from \S+ import|class |def |(for|with) .*:$|print\(|plt\.|[a-z_][\w.]* = ", line
            )
            assert not is_code or number in covered, line


@pytest.mark.parametrize("ours", [False, True], ids=["nn.Embedding is ours", "the lesson's classes are ours"])
def test_the_lesson_on_embeddings_runs(seeds, pictures, monkeypatch, unchecked, capsys, ours) -> None:
    pytest.importorskip("sklearn")
    module = ModuleType("embeddings")  # the lesson's own file
    for name in (
        "TokenEmbedding",
        "LearnedPositionalEmbedding",
        "SinusoidalPositionalEmbedding",
        "TransformerEmbedding",
        "demonstrate_embeddings",
    ):
        setattr(module, name, getattr(el.lessons if name == "demonstrate_embeddings" else el, name))
    monkeypatch.setitem(sys.modules, "embeddings", module)
    names: dict[str, Any] = {"el": el, "__name__": "lesson"}
    for (first, _), code in zip(BLOCKS[LESSON], blocks_of(seeds, LESSON), strict=True):
        if first == 293:  # five tokens, and dots for those that are not written out
            names["E"] = names["scratch_emb"].W[:5]
            code = code.replace(", ...]", "]")
        if first == 298:
            names.update(max_seq_len=32, embed_dim=8, seq_len=4)
        if first == 308:  # the tables that the lesson indexes as tensors
            table, position = el.TokenEmbedding(100, 8), el.LearnedPositionalEmbedding(32, 8)
            names.update(token_embedding=table.weight, position_embedding=position.weight)
            names.update(token_ids=torch.tensor([[42, 7, 42, 1]]))
        run(code, names, ours)
        if first == 109:
            np.testing.assert_allclose(names["result_torch"].detach().numpy(), names["result"], atol=1e-7)
        if first == 173:
            used = names["torch_emb"].weight.grad.abs().sum(1).nonzero().flatten()
            assert used.tolist() == [1, 3, 7]
        if first == 293:
            assert np.array_equal(names["embedding"], names["E"][3])
        if first == 308:
            gpt = el.lessons.GPTEmbedding(100, 8, 32)
            gpt.load_state_dict({"tok_emb.weight": table.weight, "pos_emb.weight": position.weight})
            assert torch.equal(names["x"], gpt(names["token_ids"]))
        if first == 350:
            ours_of_same_size = el.SinusoidalPositionalEmbedding(128, 64)
            torch.testing.assert_close(ours_of_same_size(torch.arange(128)), names["pe"], atol=2e-5, rtol=0)
        if first == 403:
            layer, tokens, positions = names["emb"], names["tokens"], names["positions"]
            expected = layer.token_embedding(tokens) * layer.scale + layer.position_embedding(positions)
            assert torch.equal(names["output"], expected)
            assert layer.scale == math.sqrt(64)
            assert isinstance(layer, el.TransformerEmbedding) is ours
        if first == 588:
            model = names["model"]
            assert model.output_proj.weight is model.embedding.weight
            assert sum(parameter.numel() for parameter in model.parameters()) == 256_000
    assert names["ModuleTransformerEmbedding"] is el.TransformerEmbedding
    printed = capsys.readouterr().out
    assert "Match: True" in printed
    assert "Match: False" not in printed
    assert "Are weights shared? True" in printed


@pytest.mark.parametrize("ours", some([True], [False, True]))
def test_the_notebook_on_the_embedding_layer_runs(
    seeds, shared_data, tmp_path, monkeypatch, unchecked, capsys, ours
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data" / "the-verdict.txt").symlink_to(shared_data / "text" / "the-verdict.txt")
    for name in ("gpt2-encoder.json", "gpt2-vocab.bpe"):
        (tmp_path / "notebooks" / name).symlink_to(shared_data / "tokenizers" / name)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", list(sys.path))
    part = ModuleType("src.part03_dataloader")  # the file of the lesson before
    part.create_dataloader_v1 = el.lessons.create_dataloader_v1
    for name, module in (
        ("tiktoken", ModuleType("tiktoken")),  # imported and not used: our tokenizer reads GPT-2's files
        ("src", ModuleType("src")),
        ("src.part03_dataloader", part),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, Any] = {"el": el, "__name__": "lesson"}
    for cell in cells_of(seeds):
        run(cell, names, ours)
    assert names["GPT_CONFIG_124M"] == el.lessons.GPT_CONFIG_124M
    assert isinstance(names["embedding_module"], el.lessons.GPTEmbedding) is ours
    assert names["final_embeddings"].shape == names["input_embeddings"].shape == (8, 4, 256)
    assert torch.equal(names["embeddings_method1"], names["embeddings_method2"])
    module, inputs = names["embedding_module"], names["inputs"]
    torch.testing.assert_close(
        names["final_embeddings"], module.tok_emb(inputs) + module.pos_emb(torch.arange(4)), rtol=0, atol=0
    )
    assert "Are both methods identical? True" in capsys.readouterr().out


def test_the_page_on_linear_layers_runs(seeds, unchecked) -> None:
    names: dict[str, Any] = {"el": el, "torch": torch}
    for code in blocks_of(seeds, LINEAR):
        run(code, names, ours=False)
    assert isinstance(names["embedding"], el.TokenEmbedding)
    torch.testing.assert_close(names["linear"](names["onehot"].float()), names["embedding"](names["idx"]))


def test_the_page_on_llama_runs(seeds, unchecked) -> None:
    """The line of its class, and its walk from three words to vectors of 8 numbers."""
    text = (seeds / LLAMA).read_text()
    line = next(line for line in text.splitlines() if line.startswith("self.embeddings = "))
    names = {"el": el, "self": SimpleNamespace(), "n_embd": 8}
    names["tokenizer"] = SimpleNamespace(get_vocab_size=lambda: 3000)  # an arbitrary word-level tokenizer
    run(line, names, ours=False)
    table = names["self"].embeddings
    assert isinstance(table, el.TokenEmbedding)
    rows = {int(index): ast.literal_eval(row) for index, row in re.findall(r"^(\d+): (\[.*\])$", text, flags=re.M)}
    with torch.no_grad():
        for index, row in rows.items():
            table.weight[index] = torch.tensor(row)
    ids = ast.literal_eval(re.search(r"^\[\d+, \d+, \d+\]$", text, flags=re.M)[0])
    expected = [ast.literal_eval(row) for row in re.findall(r"^(\[ ?-?\d.*\]),? # ", text, flags=re.M)]
    assert table(torch.tensor(ids)).tolist() == torch.tensor(expected).tolist()
    assert table(torch.tensor([ids])).shape == (1, 3, 8)


def plain_windows(ids: list[int], max_length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    starts = range(0, len(ids) - max_length, stride)
    return [(ids[at : at + max_length], ids[at + 1 : at + max_length + 1]) for at in starts]


def test_the_loader_of_the_notebook_cuts_the_windows_of_its_lesson(shared_data, gpt2) -> None:
    text = (shared_data / "text" / "the-verdict.txt").read_text() + "<|endoftext|>The end."
    files = shared_data / "tokenizers" / "gpt2-encoder.json"
    loader = el.lessons.create_dataloader_v1(text, 8, 4, 3, shuffle=False, drop_last=False, tokenizer=files)
    expected = plain_windows(gpt2.encode(text).ids, 4, 3)
    inputs, targets = (torch.cat(part).tolist() for part in zip(*loader, strict=True))
    assert list(zip(inputs, targets, strict=True)) == expected


def test_gpt2s_tokenizer_is_found_in_hugging_faces_cache(gpt2, tmp_path, monkeypatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # it would download the tokenizer
    with pytest.raises(el.TokenizerError, match="tokenizer was not found.*\n.*tokenizer='path/to/encoder.json'"):
        el.lessons.create_dataloader_v1("I love dogs")
    model = tmp_path / "cache" / "models--openai-community--gpt2"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    gpt2.save(str(snapshot / "tokenizer.json"))
    inputs, _ = next(iter(el.lessons.create_dataloader_v1("I love dogs and cats", 1, 2, 2, shuffle=False)))
    assert inputs.tolist() == [gpt2.encode("I love").ids]
    el.train_tokenizer("I love dogs", kind="word").save(str(tmp_path / "encoder.json"))
    with pytest.raises(el.TokenizerError, match="encoder.json is not GPT-2's tokenizer"):
        el.lessons.create_dataloader_v1("I love dogs")
