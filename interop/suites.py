"""The test suites: which tests of which library, and what takes the place of what in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EMBEDDING = {r"\b(?:torch\.)?nn\.Embedding\(": "interop_embedding("}
"""Each `nn.Embedding` that a test builds becomes a `TokenEmbedding`."""

VECTORS = {r"\b(?:gensim\.models\.)?KeyedVectors\.load_word2vec_format\(\s*datapath": "interop_vectors(datapath"}
"""Vectors that a test reads become a `TokenVectors`."""


@dataclass(frozen=True)
class Suite:
    """Tests of one library.

    Args:
        library: Name of the package.
        tests: What is run. From a wheel or a source distribution: paths inside it; else names in `interop/scripts`.
        carrier: Where the tests are taken from.
        select: pytest's `-k`.
        replace: Patterns in the sources of the tests, and what ours has in their place.
        copied: Further paths that the tests need beside them.
        stand_ins: Modules that the tests import and the distribution leaves out, and their text.
    """

    library: str
    tests: tuple[str, ...]
    carrier: Literal["wheel", "sdist", "script"]
    select: str = ""
    replace: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "gensim": Suite("gensim", ("gensim/test/test_keyedvectors.py",), "wheel", replace=VECTORS),
    "opacus": Suite(
        "opacus",
        ("opacus/tests/grad_samples/embedding_test.py",),
        "wheel",
        replace=EMBEDDING,
        copied=("opacus/tests/grad_samples/__init__.py", "opacus/tests/grad_samples/common.py"),
    ),
    "peft": Suite(
        "peft",
        ("tests/test_low_level_api.py", "tests/test_custom_models.py"),  # most others need models of a hub
        "sdist",
        select="TestLowLevelFunctional or (TestPeftCustomModel and (Emb or emb))",
        replace=EMBEDDING,
        copied=("tests/testing_common.py", "tests/testing_utils.py"),
        stand_ins={"tests/__init__.py": "", "diffusers/__init__.py": "class StableDiffusionPipeline: pass"},
    ),
    "transformers": Suite(
        "transformers",
        ("test_transformers.py",),
        "sdist",
        copied=("tests/test_*.py",),
        stand_ins={
            "tests/__init__.py": "",
            "tests/exporters/__init__.py": "",
            "tests/exporters/test_export.py": "class ExportTesterMixin: pass",
            "tests/generation/__init__.py": "",
            "tests/generation/test_utils.py": "class GenerationTesterMixin: pass",
        },
    ),
    "torch": Suite("torch", ("test_torch.py",), "script"),
    "lightning": Suite("lightning", ("test_lightning.py",), "script"),
    "accelerate": Suite("accelerate", ("test_accelerate.py",), "script"),
    "trl": Suite("trl", ("test_trl.py",), "script"),
    "onnx": Suite("onnx", ("test_onnx.py",), "script"),
    "sentence-transformers": Suite("sentence-transformers", ("test_sentence_transformers.py",), "script"),
}
