"""Do additional tables help? Train the demo's decoder with each for an equal wall time, and compare bits per byte.

    python examples/added_tables.py ../shared/data/text/enwiki-plain.txt --minutes 4 --write docs/large-tables.md

trains each variant on the Python language reference and on the text, and puts a table for both between the markers of
the page. The variants take turns of a few seconds, so that another program on the machine slows all of them alike.
"""

import argparse
import time
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.cli.training_runs import LayerOptions, build_model
from embedlayer.io.files import JsonObject

TURN_SECONDS = 5.0
VARIANTS: dict[str, JsonObject] = {
    "nothing more": {},
    "value embeddings": {"value_embedding": True},
    "n-gram table, 2^14 rows": {"ngram": 1 << 14},
    "n-gram table, 2^17 rows": {"ngram": 1 << 17},
    "n-gram table, 2^20 rows": {"ngram": 1 << 20},
    "per-layer embeddings, width 24": {"per_layer": 24},
}


def trainer_of(
    options: JsonObject, tokenizer: Tokenizer, corpus: el.TokenCorpus, minutes: float, seed: int
) -> el.Trainer:
    """A trainer with `embedlayer train`'s settings, and the additional tables of a variant."""
    torch.manual_seed(seed)
    training = el.TrainingOptions(minutes=minutes, seed=seed)
    model = build_model(LayerOptions(**options), tokenizer, training.max_length)
    return el.Trainer(model, *corpus.split(0.1), training)


def train_in_turns(trainers: dict[str, el.Trainer]) -> dict[str, list[JsonObject]]:
    """Run all trainers to their ends, a few seconds each in turn, and return their lines of metrics."""
    lines: dict[str, list[JsonObject]] = {name: [] for name in trainers}
    left = dict(trainers)
    while left:
        for name, trainer in list(left.items()):
            until = time.perf_counter() + TURN_SECONDS

            def stop_in_time(step: int, trainer: el.Trainer = trainer, until: float = until) -> None:
                if time.perf_counter() > until:
                    trainer.stop()

            lines[name] += trainer.run(on_step=stop_in_time)
            if trainer.step == trainer.steps:
                del left[name]
    return lines


def compare(text: str, minutes: float, variants: list[str], seed: int) -> list[dict[str, str]]:
    tokenizer = el.train_tokenizer(text, vocab_size=LayerOptions.vocab_size)
    corpus = el.TokenCorpus.from_text(text, tokenizer)
    trainers = {name: trainer_of(VARIANTS[name], tokenizer, corpus, minutes, seed) for name in variants}
    lines = train_in_turns(trainers)
    rows = []
    for name, trainer in trainers.items():
        bits = [line["validation_bits_per_byte"] for line in lines[name] if "validation_bits_per_byte" in line]
        added = sum(parameter.numel() for parameter in trainer.model.injections.parameters())
        rows.append(
            {
                "decoder with": name,
                "parameters added": f"{added / 1e6:.1f} M" if added else "",
                "steps": f"{trainer.step:,}",
                "bits per byte": f"{bits[-1]:.3f}",
                "lowest on the way": f"{min(bits):.3f}",
            }
        )
    return rows


def main(files: list[Path], minutes: float, page: Path | None, variants: list[str], seed: int) -> None:
    texts = {"the Python language reference": carried_text()}
    texts |= {file.name: file.read_text(encoding="utf-8") for file in files}
    parts = []
    for name, text in texts.items():
        size = f"{len(text.encode()) / 1e6:.1f} MB"
        table = markdown_table(compare(text, minutes, variants, seed))
        parts.append(f"{minutes:g} minutes each on {name} ({size}):\n\n{table}")
        print(parts[-1], flush=True)
    if page is not None:
        write_between_markers(page, "decoders with additional tables", "\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="further texts")
    parser.add_argument("--minutes", type=float, default=4.0, help="wall time of each training")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="a variant; may be given again [all]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and of the batches")
    parser.add_argument("--write", type=Path, help="page that holds the table")
    arguments = parser.parse_args()
    variants = arguments.only or list(VARIANTS)
    main(arguments.files, arguments.minutes, arguments.write, variants, arguments.seed)
