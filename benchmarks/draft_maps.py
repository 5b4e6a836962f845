"""Tokens that the tokenizers of a draft and its target share: our map beside the rule of transformers.

`pairs` is the number of pairs, `wrong` how many of them stand for other bytes, and `coverage` the share of the draft's
tokens of a text that are in a pair. `between_s` is the CPU time of `DraftMap.between`.
"""

import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from benchmarks.harness import Case, Row
from benchmarks.tokenizer_pairs import CHARACTERS, FILES, SHARED, TEXT
from embedlayer.heads import DraftMap
from embedlayer.tokenization import TokenBytes, load_tokenizer, table_size

PAIRS = (
    ("GPT-2", "LLaMA-2"),
    ("LLaMA-2", "GPT-2"),
    ("T5", "GPT-2"),
    ("BERT cased", "GPT-2"),
    ("LLaMA-2", "Phi-3"),
    ("stories260K", "LLaMA-2"),
)
"""Draft and target of each row."""


def run() -> list[Row]:
    if not SHARED.is_dir():
        print(f"No rows: there is no {SHARED}", file=sys.stderr)
        return []
    text = (SHARED / TEXT).read_text(encoding="utf-8")[:CHARACTERS]
    tokenizers = {name: load_tokenizer(SHARED / FILES[name]) for name in {name for pair in PAIRS for name in pair}}
    ids = {name: torch.tensor(tokenizers[name].encode(text).ids) for name in {draft for draft, _ in PAIRS}}
    rows: list[Row] = []
    for draft, target in PAIRS:
        start = time.process_time()
        shared = DraftMap.between(tokenizers[draft], tokenizers[target])
        seconds = time.process_time() - start
        maps = {
            "embedlayer": shared.to_target(torch.arange(shared.draft_size)),
            "transformers": _of_transformers(tokenizers[draft], tokenizers[target]),
        }
        for competitor, to_target in maps.items():
            rows.append(
                {
                    "competitor": competitor,
                    "draft": draft,
                    "target": target,
                    "pairs": int((to_target >= 0).sum()),
                    "wrong": _wrong(to_target, tokenizers[draft], tokenizers[target]),
                    "coverage": round(float((to_target[ids[draft]] >= 0).double().mean()), 4),
                    "between_s": round(seconds, 2) if competitor == "embedlayer" else "",
                    "transformers": version("transformers"),
                }
            )
    return rows


def _of_transformers(draft: Tokenizer, target: Tokenizer) -> torch.Tensor:
    """Return the target's ID of each of the draft's, as assisted generation of transformers maps them, or -1."""
    fast: Any = PreTrainedTokenizerFast
    own, other = (fast(tokenizer_object=each) for each in (target, draft))
    translator = AssistantToTargetTranslator(own, other, table_size(target))
    to_target: torch.Tensor = translator._assistant_to_target_input_ids
    return to_target.where(to_target != translator.SUPPRESS_TOKEN_ID, -1)


def _wrong(to_target: torch.Tensor, draft: Tokenizer, target: Tokenizer) -> int:
    """Return how many pairs of ordinary tokens stand for other bytes, whether or not a space is before a word."""
    ours, theirs = TokenBytes(draft), TokenBytes(target)
    pairs = ((token, int(other)) for token, other in enumerate(to_target) if other >= 0)
    return sum(
        {*ours.readings(token)}.isdisjoint(theirs.readings(other))
        for token, other in pairs
        if token not in ours.special and other not in theirs.special
    )


CASE = Case("Tokens that two tokenizers share", run)
