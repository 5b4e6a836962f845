"""Compare the loaded embedding layer of well-known models with transformers, and print what was read and differs.

    python tools/checkpoints.py --write docs/checkpoints.md
    python tools/checkpoints.py "LLaMA 3" "T5 1.1"

compares each model of `tiny_models.VARIANTS` as `all_families` compares the model types with their default settings.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from all_families import examine, page_row
from tiny_models import VARIANTS, quiet

import embedlayer as el

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from tables import markdown_table, write_between_markers

COMPARED = ("result", "first block's input", "positions", "head", "patched")


def row(name: str) -> dict[str, str]:
    """Return the row of a model in the table."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder, quiet():
        variant.build()[1].save_pretrained(folder)
        report = el.load(folder).report()
    result = page_row(examine(variant.model_type, variant.kind, variant.settings), {})
    return {
        "model": name,
        "input embedding": " -> ".join(("look-up", *report.recipe)),
        "scale": "-" if report.scale is None else f"{report.scale:.4g}",
        "position scheme": ", ".join(dict.fromkeys(one.partition("(")[0] for one in report.positions.values())),
        "weights of the head": str(report.head),
        **{column: result[column] for column in COMPARED},
    }


def main(names: Sequence[str], page: Path | None) -> None:
    rows = [row(name) for name in names or VARIANTS]
    text = markdown_table(rows)
    text += f"\ntransformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}.\n"
    print(text)
    if page is not None:
        write_between_markers(page, "checkpoints", text)
    if any(each["result"] != "equal" for each in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models; all by default")
    parser.add_argument("--write", type=Path, help="page to write the table to")
    options = parser.parse_args()
    main(options.models, options.write)
