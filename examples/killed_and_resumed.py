"""Train a mapped n-gram table, kill the process, resume, and end bit for bit where an undisturbed run ends.

    python examples/killed_and_resumed.py --rows 1000000

predicts the next token of the Python language reference from hashed n-grams alone. The rows and their optimizer state
stay in the files of a folder. Everything else goes into one file at each checkpoint.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.inputs import NgramEmbedding, NgramHash
from embedlayer.tables import MappedEmbedding
from embedlayer.tokenization import compressed_tokens

STEPS, SAVE_EVERY, KILLED_AT, LENGTH = 30, 8, 21, 64


def train(folder: Path, rows: int, *, kill: bool) -> None:
    """Train from the last checkpoint in the folder, or from the start."""
    text = carried_text()[:200_000]
    tokenizer = el.train_tokenizer(text, vocab_size=1000)
    corpus = torch.tensor(tokenizer.encode(text).ids)
    size = tokenizer.get_vocab_size()
    hash = NgramHash.for_rows(rows, size, heads=4, token_map=compressed_tokens(tokenizer))
    torch.manual_seed(0)
    head, rest, start = nn.Linear(64, size), folder / "rest.pt", 0
    adamw = torch.optim.AdamW(head.parameters(), lr=3e-3)
    if rest.exists():
        saved = torch.load(rest, weights_only=True)
        table = MappedEmbedding.resume(folder / "rows", saved["generation"])
        head.load_state_dict(saved["head"])
        adamw.load_state_dict(saved["adamw"])
        start = saved["step"]
        print(f"resumed after step {start} of {STEPS}", flush=True)
    else:
        table = MappedEmbedding.create(folder / "rows", hash.num_rows, 64 // hash.num_hashes, init_std=0.1)
    ngrams = NgramEmbedding(hash, table)
    row_adamw = el.RowAdamW(table.parameters(), lr=3e-2)
    for step in range(start, STEPS):
        windows = corpus.unfold(0, LENGTH + 1, LENGTH)[torch.arange(8) + 8 * step]
        loss = F.cross_entropy(head(ngrams(windows[:, :-1])).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        for optimizer in (adamw, row_adamw):
            optimizer.step()
            optimizer.zero_grad()
        if kill and step + 1 == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % SAVE_EVERY == 0:
            with table.checkpoint() as generation:
                state = {"head": head.state_dict(), "adamw": adamw.state_dict(), "step": step + 1}
                torch.save({**state, "generation": generation}, folder / "rest.partial")
                os.replace(folder / "rest.partial", rest)
    print(f"loss of the last step: {loss.item():.6f} nats per token", flush=True)
    table.apply_pending_updates()
    torch.save({"rows": table.weight.detach().clone(), "head": head.state_dict()}, folder / "result.pt")
    table.close()


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        results = []
        for run, kinds in {"undisturbed": [""], "killed": ["--kill", ""]}.items():
            folder = Path(name) / run
            folder.mkdir()
            for kind in kinds:
                command = [sys.executable, __file__, "--rows", str(rows), "--folder", str(folder), *kind.split()]
                code = subprocess.run(command, check=False).returncode
                print(f"{run}: the process ended with {code}", flush=True)
            results.append(torch.load(folder / "result.pt", weights_only=True))
        one, other = results
        assert torch.equal(one["rows"], other["rows"])
        assert all(torch.equal(tensor, other["head"][key]) for key, tensor in one["head"].items())
        print(f"All {one['rows'].numel():,} numbers of the table, and those of the head, are equal.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is None:
        main(arguments.rows)
    else:
        train(arguments.folder, arguments.rows, kill=arguments.kill)
