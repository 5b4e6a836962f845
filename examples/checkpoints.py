"""Compare the loaded embedding layer of every model family with transformers, and print the largest differences.

    python examples/checkpoints.py --write docs/checkpoints.md

builds a small random model of each family with transformers, saves it, loads its embedding layer, and runs both on
texts with and without left padding. It writes the table between the markers of the page.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from peers import LENGTH, PEERS, Peer, compare
from tables import markdown_table, write_between_markers

import embedlayer as el


def shown(difference: float | None) -> str:
    return "-" if difference is None else "0" if difference == 0 else f"{difference:.1e}"


def row(peer: Peer) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        differences = compare(peer, Path(folder))
        report = el.load(folder).report()
    return {
        "family": peer.name,
        "input embedding": " -> ".join(("look-up", *report.recipe)),
        "scale": "-" if report.scale is None else f"{report.scale:.4g}",
        "positions": " and ".join(dict.fromkeys(scheme.partition("(")[0] for scheme in report.positions.values())),
        "head": str(report.head),
        "first block's input": shown(differences.input),
        "cos/sin or bias": shown(differences.positions),
        "logits": shown(differences.logits),
    }


def main(page: Path | None) -> None:
    text = markdown_table([row(peer) for peer in PEERS])
    text += (
        f"\nLargest absolute differences in float32, texts of {LENGTH} tokens, transformers {transformers.__version__},"
    )
    text += f" torch {torch.__version__.partition('+')[0]}.\n"
    print(text)
    if page is not None:
        write_between_markers(page, "checkpoints", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to write the table to")
    main(parser.parse_args().write)
