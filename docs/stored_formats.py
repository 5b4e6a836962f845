"""Write the tables of stored formats in docs/checkpoints.md: `python docs/stored_formats.py --write`.

What is read and written is listed by the records in `embedlayer.formats.recognition`, and what is refused by those in
`embedlayer.formats.refused`. The versions of the libraries that tests compare with are those of constraints.txt.
"""

import sys
from pathlib import Path

from embedlayer.formats.recognition import FORMATS
from embedlayer.formats.refused import REFUSED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from tables import between_markers, markdown_table  # noqa: E402

PAGE = ROOT / "docs" / "checkpoints.md"

ORACLES = {
    "GGUF": ("`gguf.quants.dequantize`", "gguf"),
    "MLX": ("`mlx.core.dequantize`", "mlx"),
    "compressed-tensors": ("its compressors' `decompress`", "compressed-tensors"),
    "ModelOpt": ("its formula, and `NVFP4QTensor` and `FP8QTensor` of nvidia-modelopt 0.47.0 where installed", ""),
    "Gemma": ("`integrations.gemma_quant` of transformers", "transformers"),
    "torchao": ("`dequantize_affine` and `Float8Tensor.dequantize`", "torchao"),
    "GPTQ": ("its formula in GPTQModel 7.7.0", ""),
    "AWQ": ("`AutoAWQConverter` of compressed-tensors", "compressed-tensors"),
    "bitsandbytes": ("`int8_vectorwise_dequant` and `dequantize_4bit`", "bitsandbytes"),
}
"""What tests compare the rows of each library's formats with, and the package whose version is shown."""


QUANTISERS = {
    "GGUF": (
        "`gguf.quants.quantize`; K-quants and IQ types, which it does not write: the whole table becomes Q8_0",
        "none",
        "llama.cpp",
    ),
    "MLX": ("`mlx.core.quantize`", "none", "`mlx.nn`'s quantised layers, as mlx-lm builds them"),
    "compressed-tensors": (
        "its compressors, with scales by its `calculate_qparams`",
        "numbers within a scale of the whole matrix",
        "transformers, `CompressedTensorsConfig(dequantize=True)`",
    ),
    "ModelOpt": ("its formula", "numbers within the scale of the whole matrix", "no reader runs on a CPU"),
    "Gemma": (
        "no public rule: the largest number of a row, divided by the largest code, is its scale",
        "none",
        "transformers",
    ),
    "torchao": ("`from_hp` of its classes", "numbers within a scale of the whole matrix", "transformers"),
    "GPTQ": ("GPTQModel's `RTN` and `pack`", "V a multiple of 8 (2 bits: 16, 3 bits: 32) and at least D", "not tested"),
    "AWQ": ("AutoAWQ's `pseudo_quantize_tensor`", "V a multiple of 8", "not tested"),
    "bitsandbytes": ("`int8_vectorwise_quant` and `quantize_4bit`", "none", "transformers"),
}
"""What quantises new rows of each library's formats, what new rows must fit, and what opens the result in tests."""


def versions() -> dict[str, str]:
    """Return the versions in constraints.txt by package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def formats_that_are_read() -> str:
    """Return the table of the formats that are read, one line for each record."""
    pinned = versions()
    rows = []
    for record in FORMATS:
        oracle, package = ORACLES[record.library]
        version = pinned[package] if package else "-"
        rows.append(
            {"library": record.library, "layout": record.title, "rows equal those of": oracle, "version": version}
        )
    return markdown_table(rows)


def formats_that_are_written() -> str:
    """Return the table of how rows of each library's formats are written, one line for each library."""
    rows = []
    for library in dict.fromkeys(record.library for record in FORMATS):
        quantised_by, limit, reader = QUANTISERS[library]
        rows.append(
            {"library": library, "new rows have the bytes of": quantised_by, "limit": limit, "opened by": reader}
        )
    return markdown_table(rows)


def layouts_that_are_refused() -> str:
    """Return the table of the layouts that are refused, with the reason and the advice of the error."""
    return markdown_table(
        [
            {
                "library": layout.library,
                "layout": layout.title,
                "reason": layout.reason,
                "what to do": layout.advice.replace("_", "\\_"),
            }
            for layout in REFUSED
        ]
    )


def page() -> str:
    """Return the text of the page with the tables of today."""
    return between_markers(
        PAGE,
        "stored-formats",
        f"{formats_that_are_read()}\nRefused by name:\n\n{layouts_that_are_refused()}\n"
        f"Edited, trained and written:\n\n{formats_that_are_written()}",
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(formats_that_are_read(), layouts_that_are_refused(), formats_that_are_written(), sep="\n")
