"""Write `files.zip`: small files of every kind that this version of the package saves, and what they compute.

    python write_files.py FOLDER

Run with the version whose files are to be kept; `tests` is on the path for its lists of kinds.
"""

import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from kinds import EMBED_DIM, INJECTIONS, NUM_HEADS, POSITIONS, TABLES, UNTIED_HEADS, dense
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.tables import MappedEmbedding

IDS = torch.tensor([[1, 7, 48, 0, 9, 9, 2, 49]])


def pack(folder: Path, archive: Path) -> None:
    """Write all files of `folder` to a zip archive, in the order of their names."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in ("lock", "text.txt"):
                file.write(path, path.relative_to(folder))


def steps(table, optimizer, *batches) -> None:
    """Make one optimizer step for the rows of each batch."""
    for ids in batches:
        optimizer.zero_grad()
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()


def decoder(position, *injections) -> el.DecoderLM:
    layers = 2 if injections else 1
    return el.DecoderLM(dense(), position, num_layers=layers, num_heads=NUM_HEADS, injections=injections)


def write(folder: Path) -> None:
    """Save a layer of every kind, and keep its result for `IDS`."""
    torch.manual_seed(0)
    expected: dict[str, torch.Tensor] = {"ids": IDS}

    def keep(name: str, model: torch.nn.Module, inputs: torch.Tensor) -> None:
        with torch.no_grad():
            for weight in model.parameters():  # few values, so that the archive stays small
                if weight.is_floating_point():
                    weight.copy_((weight / weight.abs().max().clamp(min=1e-6) * 4).round() / 8)
            if isinstance(model, el.OutputHead) and model.padding_idx is not None:
                model.weight[model.padding_idx] = 0  # this version initialises it otherwise, and does not multiply it
        model.eval().save_pretrained(folder / name)
        expected[name] = model(inputs).detach().clone().contiguous()

    hidden = torch.randn(1, 3, EMBED_DIM)
    expected["hidden"] = hidden
    for name in TABLES:
        keep(f"tables/{name}", TABLES[name](), IDS)
    for name in POSITIONS:
        keep(f"positions/{name}", decoder(POSITIONS[name]()), IDS)
    for name in UNTIED_HEADS:
        keep(f"heads/{name}", UNTIED_HEADS[name](), hidden)
    for name in INJECTIONS:
        keep(f"injections/{name}", decoder("rotary", INJECTIONS[name]()), IDS)
    learned = el.TransformerEmbedding(50, EMBED_DIM, 16, position=POSITIONS["learned"](), padding_idx=0)
    keep("inputs/learned", learned, IDS)
    keep("inputs/gpt", el.GPTEmbedding(50, EMBED_DIM, 16), IDS)

    # Row-sparse training: two steps, which leave updates pending, are saved; the third gives the expected rows.
    memory = dense(el.RowSparseEmbedding)
    optimizer = el.RowAdamW(memory.parameters(), lr=0.1)
    steps(memory, optimizer, [1, 2, 3], [7, 48, 4])
    torch.save({"table": memory.state_dict(), "optimizer": optimizer.state_dict()}, folder / "training/memory.pt")
    steps(memory, optimizer, [5, 48])
    expected["training/memory"] = memory(IDS).detach().clone()
    with MappedEmbedding.create(folder / "training/mapped", 50, EMBED_DIM, init_std=0.02) as mapped:
        optimizer = el.RowAdamW(mapped.parameters(), lr=0.1)
        steps(mapped, optimizer, [1, 2, 3], [7, 48, 4])
        with mapped.checkpoint():
            pass
        steps(mapped, optimizer, [5, 48])
        expected["training/mapped"] = mapped(IDS).detach().clone()
    save_file(expected, folder / "expected.safetensors")


def run_commands(folder: Path) -> None:
    """Write a corpus, a run on it, an edit of the run and its smaller form by the commands."""
    random.seed(0)
    words = ["the", "a", "small", "old", "house", "river", "sees", "finds", "man", "woman", "and", "slowly", "green"]
    text = "\n".join(" ".join(random.choices(words, k=12)) for _ in range(400))
    (folder / "text.txt").write_text(text + "\n", encoding="utf-8")
    for line in (
        "corpus build text.txt -o corpus --vocab-size 280 --shards 2 --workers 1",
        "train corpus -o run --dim 8 --layers 1 --heads 2 --steps 6 --length 16 --batch-size 2",
        "vocab add run riverhouse -o edited",
        "compress run --to int8 -o int8",
    ):
        subprocess.run([sys.executable, "-m", "embedlayer", *line.split()], cwd=folder, check=True)
        (folder / "run/report.html").unlink(missing_ok=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    (target / "training").mkdir(parents=True)
    write(target)
    run_commands(target)
    pack(target, target.with_suffix(".zip"))
