"""Train the same decoder tied, untied, factorised, and tied from a N(0, 1) start, for the same steps.

    python examples/tied_or_untied.py --steps 300 --write docs/tying.md --metrics docs/gallery/runs

trains each on the Python language reference, puts the table between the markers of the page, and keeps what was logged
for the picture in the gallery.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.io.files import JsonObject, create_folder, write_text

VOCABULARY, WIDTH, LENGTH = 4096, 192, 128


def dense(init_std: float = 0.02) -> el.TokenTable:
    return el.TokenEmbedding(VOCABULARY, WIDTH, scale="sqrt_dim", init_std=init_std)


VARIANTS = {  # each makes its table and its head; no head means one tied to the table
    "tied, std 0.02": lambda: (dense(), None),
    "untied, std 0.02": lambda: (dense(), el.OutputHead(vocab_size=VOCABULARY, embed_dim=WIDTH)),
    "tied, factorised to rank 48": lambda: (el.FactorizedEmbedding(VOCABULARY, WIDTH, 48, scale="sqrt_dim"), None),
    "tied, std 1 (`nn.Embedding`'s start)": lambda: (dense(init_std=1.0), None),
}


def write_metrics(path: Path, lines: Sequence[JsonObject]) -> None:
    """The losses of a run, as its `metrics.jsonl` has them; not the speed, which is the machine's."""
    kept = ({key: round(value, 4) for key, value in line.items() if "per_second" not in key} for line in lines)
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def main(steps: int, page: Path | None, metrics: Path | None) -> None:
    if metrics is not None:
        create_folder(metrics)
    tokenizer = el.train_tokenizer(carried_text(), vocab_size=VOCABULARY)
    corpus = el.TokenCorpus.from_text(carried_text(), tokenizer)
    rows = []
    for name, make in VARIANTS.items():
        torch.manual_seed(0)
        table, head = make()
        model = el.DecoderLM(table, el.RotaryEmbedding(32), head, num_layers=4, num_heads=6)
        options = el.TrainingOptions(steps=steps, max_length=LENGTH, seed=0)
        lines = list(el.Trainer(model, *corpus.split(0.1), options).run())
        if metrics is not None:
            file = re.sub("[^a-z0-9]+", "-", name.partition(" (")[0]) + ".jsonl"
            write_metrics(metrics / file, lines)
        ends = {*table.parameters(), *model.head.parameters()}
        rows.append(
            {
                "variant": name,
                "parameters at both ends": f"{sum(parameter.numel() for parameter in ends):,}",
                "first loss": f"{lines[0]['loss']:.2f}",
                "validation loss": f"{lines[-1]['validation_loss']:.3f}",
            }
        )
        print(rows[-1], flush=True)
    text = markdown_table(rows)
    text += f"\n{steps} steps of 8 x {LENGTH} tokens, seed 0, V = {VOCABULARY:,}, D = {WIDTH}, 4 layers; "
    text += f"ln V = {math.log(VOCABULARY):.2f}.\n"
    print(text)
    if page is not None:
        write_between_markers(page, "tied-or-untied", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    parser.add_argument("--metrics", type=Path, help="folder for a metrics file of each variant")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.write, arguments.metrics)
