"""Count the functions, classes and files of the package that one call runs: how long a walk through the code is.

    python tools/walks.py [--list NAME]

Each call runs once before it is counted, so that imports, caches and compiled kernels are not part of it; `neighbors`
and `add_tokens` read a small GPT-2 that transformers saved.
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import embedlayer as el

PACKAGE = str(Path(el.__file__).parent)


def called_code(call: Callable[[], object]) -> dict[CodeType, type | None]:
    """Return the functions of the package that `call` runs, with the class of the first argument of methods."""
    called: dict[CodeType, type | None] = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            is_method = "." in code.co_qualname.replace(".<locals>.", "")
            called.setdefault(code, (owner if isinstance(owner, type) else type(owner)) if is_method else None)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def save_gpt2(folder: Path) -> None:
    """Save a small GPT-2 of transformers with a tokenizer of 300 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(folder)
    tokenizer = el.train_tokenizer(["the cat sat on the mat and the dog sat on the cat " * 20], vocab_size=300)
    tokenizer.save(str(folder / "tokenizer.json"))


def walks(folder: Path) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return for each walk its call before the count, and the counted call."""
    from embedlayer.cli.neighbors import neighbors

    torch.manual_seed(0)
    embedding = el.TransformerEmbedding(1000, 64, 32, dropout=0.1)
    head = el.OutputHead(table=embedding.table)
    ids = torch.randint(1, 1000, (2, 16))
    hidden = torch.randn(2, 16, 64, requires_grad=True)
    large = el.OutputHead(64, 50_257)
    many, targets = torch.randn(2048, 64, requires_grad=True), torch.randint(50_257, (2048,))
    table = el.RowSparseEmbedding(1000, 64)
    optimizer = el.RowAdamW(table.parameters())
    save_gpt2(folder / "model")

    def backward() -> None:
        optimizer.zero_grad()
        table(ids).sum().backward()

    def train() -> None:
        backward()
        optimizer.step()
        backward()

    def find_neighbors() -> object:
        with redirect_stdout(io.StringIO()):
            return neighbors.main([str(folder / "model"), "the"], standalone_mode=False)

    def add(name: str) -> Callable[[], object]:
        return lambda: el.vocab.add_tokens(folder / "model", ["walks", "counted"], out=folder / name)

    return {
        "TransformerEmbedding(ids)": (lambda: embedding(ids), lambda: embedding(ids)),
        "OutputHead.loss(hidden)": (lambda: head.loss(hidden, ids), lambda: head.loss(hidden, ids)),
        "OutputHead.loss in chunks": (lambda: large.loss(many, targets), lambda: large.loss(many, targets)),
        "neighbors source": (find_neighbors, find_neighbors),
        "add_tokens": (add("first"), add("second")),
        "RowAdamW.step": (train, optimizer.step),
    }


def main() -> None:
    """Print the table of all walks, or the functions of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="NAME", help="print the functions of this walk, in the order of their calls")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        for name, (prepare, call) in walks(Path(folder)).items():
            prepare()
            called = called_code(call)
            files = {code.co_filename for code in called}
            owners = {owner for owner in called.values() if owner is not None}
            print(f"{name:28} {len(called):4} functions {len(owners):3} classes {len(files):3} files", file=sys.stderr)
            if name == listed:
                for code in called:
                    print(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()
