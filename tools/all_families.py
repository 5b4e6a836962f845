"""Compare the loaded embedding layer of every model type of transformers with the original model.

    python tools/all_families.py                       # every type of every kind
    python tools/all_families.py llama bert --json -   # a few, as JSON lines
    python tools/all_families.py --write docs/families.md
    python tools/all_families.py --further --write docs/families.md   # every type of the further kinds
    python tools/all_families.py --varied masked       # other settings than the default ones

A small random model of each type (`tiny_models`) is saved, its embedding layer is loaded, and both compute the same. A
type is

- equal, if every comparison that applies ran and its largest relative difference is at most 1e-6. The relative
  difference is `max |ours - theirs| / max |theirs|`;
- refused, if `embedlayer.load` or `embedlayer.patch` does not take it, or `load` reads the table alone;
- wrong, if a comparison differs or a compulsory one could not be made;
- not built, if transformers cannot build it from such a configuration, or its own forward pass fails;
- without a vocabulary, if its configuration states no size of one, or the model has no tensor of that size.

With `--varied`, models have other settings than the default ones (`varied_settings`), and training is not compared.

Comparisons, in float32 except where it says float64:

- `input`: the input of the first block; also with left padding, `position_ids` and `token_type_ids`. `decoder input`
  is that of the decoder of an encoder-decoder model.
- `positions`: queries and keys of every block, rotated by the family's own functions and by
  `layer.position_of_block(i)`, for positions 0 to 12. A block in which the family rotates nothing must have a scheme
  that rotates nothing. `bias` compares biases that the family computes by a function of its own.
- `positions from 300`, and from 3,000 and 70,000: the same in float64. transformers computes angles in float32, which
  are off by `position * 6e-8` radians, so its code runs with float64 in its place (`transformers_probe.Float64`).
  Blocks get the hidden states of the run at short positions. A block whose output then changes, although it rotates
  nothing, must scale its queries; `query scale` compares the length of queries at long and at short positions.
- `final norm`: `layer.final_norm` of the output of the last block, and the hidden states that enter the head.
- `windows`: `layer.window_of_block(i)`, and the window of the attention of each block.
- `head`: the logits for the hidden states that enter the head.
- `patched logits`, `patched loss`, `patched gradients`: those of the model after `embedlayer.patch`
  (`patched_loss`; gradients in float64 with limit 1e-10, the loss with limit 1e-5).

`COMPULSORY` says without which comparisons a type of a kind is not equal: `input`, `head` and `patched loss` for
language models, `input` alone for base models. Each comparison that was not made is listed with its reason. Of a model
that takes no text alone, the part that does is compared; where no part does, random states are passed in place of the
encoder's. The training of further kinds is not compared. A head that is loaded for a model without one is wrong.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from patched_loss import GRADIENT_LIMIT, LOSS_LIMIT, batch, compare_patched, relative
from tiny_models import (
    CODES,
    FILLED,
    FURTHER_KINDS,
    KINDS,
    OVERRIDES,
    PARTS,
    VOCAB,
    CannotBuild,
    build,
    model_types,
    quiet,
    small_config,
    text_config,
)
from torch import Tensor, nn
from transformers_probe import Block, Run, arranged, in_float64, main_stacks, observe
from varied_settings import Variation, shorten, variations

import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.refusals import table_names
from embedlayer.families import REFUSED, VOCAB_SIZE_KEYS

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from tables import markdown_table, write_between_markers

TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence-to-sequence models",
    "image-text": "Language models of vision-language models",
    "text encoder": "Text encoders",
    "speech": "Speech to text",
    "ctc": "Speech to text with CTC",
    "rnnt": "Speech to text with RNN-T",
    "tdt": "Speech to text with TDT",
    "waveform": "Text to waveform",
    "spectrogram": "Text to spectrogram",
    "retrieval": "Retrieval",
    "zero-shot image": "Zero-shot image classification",
    "zero-shot object": "Zero-shot object detection",
    "text recognition": "Text recognition",
    "decision": "Decisions",
    "base": "Base models",
}
"""Kind -> title of its table."""

VERDICTS = ("equal", "refused", "wrong", "not built")
"""Columns of the counts on the page."""

NO_VOCABULARY = "no vocabulary"
"""Verdict of a further kind: the model has no rows for tokens. The page counts and names these types."""

LIMIT = 1e-6
"""Largest relative difference in float32 that counts as equal."""

TOKENS, PADDED = 13, 4
"""Tokens of a text, and number of padding tokens in front of the second text."""

BASE = torch.arange(1, TOKENS + 1)
"""Positions with which long ones are compared; some recurrent layers begin anew at position 0."""

COMPULSORY = {
    **dict.fromkeys(KINDS, ("input", "head", "patched loss")),
    **dict.fromkeys(FURTHER_KINDS, ("input",)),
    "speech": ("input", "head"),
}
"""Kind -> comparisons without which a type is not equal. Base models and encoders have no head."""

PLACED = ("csm", "higgs_audio_v2")
"""Model types whose input has codes in place of some tokens; they also run on text alone."""

STATES = 24
"""Random hidden states that take the place of an encoder of sounds or images."""

OTHER_ROTATIONS = re.compile("Indexer|Compressor")
"""Names of modules in attention that rotate their own queries and keys."""

STARTS = (300, 3000, 70_000)
"""First positions of long texts."""


SCALED_BIAS = ("falcon",)
"""Model types whose attention divides the bias, too, by the square root of a head's width."""

SECONDS = 60
"""Limit of processor time of one model type."""

VARIED_TIMES = 8
"""How many times that limit the variations of a type may take."""


@dataclass
class Row:
    """Result of one model type.

    Attributes:
        model_type: Model type in transformers.
        kind: A key of `tiny_models.KINDS` or `FURTHER_KINDS`.
        verdict: `"equal"`, `"refused"`, `"wrong"`, `"not built"`, `"no vocabulary"` or `"crash"`; `"same"` for a
            variation that changes nothing.
        reason: Sentence that explains a verdict other than `"equal"`.
        differences: Comparison -> largest relative difference.
        left_out: Comparison -> why it was not made.
        allowed: Compulsory comparisons that the model cannot have.
        without_logits: Whether a patched training step has no operation with tokens x V numbers; `None` without a loss.
        large: What read the logits, or the operations with tokens x V numbers.
        seconds: Processor time for the whole type.
        settings: Settings with which the model is built, as in `tiny_models.build`.
        variation: Name of the variation of the settings; empty for the default ones.
        far: Whether positions far from 0 are compared.
        part: Name of the module that is compared alone, as it takes text without images or sounds; empty for the model.
    """

    model_type: str
    kind: str
    verdict: str = "equal"
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    allowed: list[str] = field(default_factory=list)
    without_logits: bool | None = None
    large: str = ""
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    variation: str = ""
    far: bool = True
    part: str = ""


def accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def texts(config: Any) -> tuple[Tensor, Tensor]:
    """Return two texts, the second one left-padded, and their attention mask."""
    pad = getattr(text_config(config), "pad_token_id", None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 100, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    ids[1, :PADDED] = pad if isinstance(pad, int) else 1
    return ids, mask


def codes_of(ids: Tensor, count: int) -> Tensor:
    """Return codes of so many streams, `(B, T, K)`, that differ by token and stream."""
    return (ids[..., None] * 7 + torch.arange(count) * 5) % 100


def num_streams(model: nn.Module) -> int:
    """Return the number of streams of codes that a model takes."""
    _, key, more = CODES[model.config.model_type]
    return int(getattr(getattr(model.config, "decoder_config", model.config), key)) + more


def code_inputs(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Return the argument of `forward` that takes codes of K streams; MusicGen takes `(B K, T)`."""
    name = model.config.model_type
    codes = codes_of(ids, num_streams(model))
    return {CODES[name][0]: codes.movedim(-1, 1).flatten(0, 1) if "musicgen" in name else codes}


def text_inputs(model: nn.Module, ids: Tensor, decoder_ids: Tensor | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of `forward` for texts, or for codes if the model takes no texts or its decoder none.

    A model that takes no `input_ids` gets random states in place of its encoder's, and the texts at its decoder.

    Args:
        model: A model, or a part of one.
        ids: Texts, for the encoder of an encoder-decoder model.
        decoder_ids: Texts for its decoder; `ids` by default.
        **options: Further arguments about the texts, such as `attention_mask`.
    """
    from transformers.utils import ModelOutput

    decoder_ids = ids if decoder_ids is None else decoder_ids
    if accepts(model, "input_ids"):
        decoder = {"decoder_input_ids": decoder_ids} if accepts(model, "decoder_input_ids") else {}
        filled = FILLED.get(model.config.model_type, {})
        zeros = {name: torch.zeros(*ids.shape, *shape) for name, shape in filled.items() if accepts(model, name)}
        is_of_codes = model.config.model_type in CODES and model.config.model_type not in PLACED
        codes = code_inputs(model, decoder_ids if decoder else ids) if is_of_codes else {}
        return {"input_ids": ids, **decoder, **zeros, **codes, **options}
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(len(ids), STATES, model.config.hidden_size, generator=generator)
    options = {f"decoder_{name}": value for name, value in options.items()}
    encoded = ModelOutput(last_hidden_state=states, attention_mask=None, hidden_states=None, attentions=None)
    return {"encoder_outputs": encoded, "decoder_input_ids": ids, **options}


def takes(model: nn.Module, name: str) -> bool:
    """Return whether `text_inputs` may pass an option: `forward` has it for the texts that are compared."""
    return accepts(model, name if accepts(model, "input_ids") else f"decoder_{name}")


def text_part(model: nn.Module) -> str:
    """Return the name of the outermost module that runs on text alone; empty for the model, also if none does."""
    from transformers import PreTrainedModel

    ids, _ = texts(model.config)
    own = text_config(model.config).model_type
    parts = [(name, each) for name, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    parts.sort(key=lambda item: (item[1] is not model, item[1].config.model_type != own))
    for name, part in parts:
        if accepts(part, "input_ids") or accepts(part, "encoder_outputs"):
            with suppress(Exception):
                if main_stacks(part, observe(part, text_inputs(part, ids))):
                    return name
    return ""


def states_vocabulary(config: Any) -> bool:
    """Return whether a configuration, as a dictionary, states the size of a vocabulary, at any depth."""
    if not isinstance(config, Mapping):
        return False
    sizes = [value for key, value in config.items() if "vocab_size" in str(key) or key in VOCAB_SIZE_KEYS]
    return any(type(size) is int for size in sizes) or any(map(states_vocabulary, config.values()))


def has_tokens(model: nn.Module, folder: str) -> bool:
    """Return whether a saved model has a tensor with an entry for each token, or one that is called like a table."""
    tensors = model.state_dict().values()
    return any(VOCAB in tensor.shape for tensor in tensors) or bool(table_names(Checkpoint.open(folder)))


def examine(
    model_type: str, kind: str, settings: Mapping[str, Any] | None = None, *, variation: Variation | None = None
) -> Row:
    """Return the row of a model type.

    Args:
        model_type: Model type in transformers.
        kind: A key of `tiny_models.KINDS`.
        settings: Settings with which the model is built, as in `tiny_models.build`.
        variation: Variation of the settings in their place; training is then not compared.
    """
    row = Row(model_type, kind, settings=settings or {})
    if variation is not None:
        row.variation, row.settings = variation.name, variation.settings
        row.far = variation.changes_positions
        row.allowed.append("patched loss")
    if kind in FURTHER_KINDS and model_type not in REFUSED and not is_of_text(model_type, kind):
        row.verdict = NO_VOCABULARY
        return row
    try:
        _, model = build(model_type, kind, row.settings)
    except CannotBuild as error:
        row.verdict, row.reason = "not built", str(error)
        return row
    with tempfile.TemporaryDirectory() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save_pretrained(folder)
            names = None if variation is None else variation.left_out
            if names is not None and not shorten(Path(folder), model.config, names):
                row.verdict = "same"
                return row
            layer = el.load(folder)
        except el.core.errors.EmbedLayerError as error:
            row.verdict, row.reason = "refused", str(error).replace(folder, "...")
            if kind in FURTHER_KINDS and not has_tokens(model, folder):
                row.verdict, row.reason = NO_VOCABULARY, ""
        else:
            if layer.family == "unknown":
                row.verdict, row.reason = "refused", "the family is unknown, so load reads the table alone"
            else:
                row.part = text_part(model) if kind in FURTHER_KINDS else PARTS.get(model_type, "")
                compare(row, model.get_submodule(row.part), layer)
                if kind in KINDS:
                    compare_final_norm(row, model.get_submodule(row.part), folder)
        if variation is None and kind in KINDS:
            compare_training(row, model)
    judge(row)
    return row


def examine_varied(model_type: str, kind: str) -> list[Row]:
    """Return a row for each variation of a model type.

    A type that is not built or refused with its default settings has one row, for these. Where settings that change
    together do not give equal results, each one also has a row of its own.
    """
    default = guarded(model_type, kind, variation=Variation("default settings", {}))
    if default.verdict in ("not built", "refused"):
        return [default]
    rows: list[Row] = []
    for variation in variations(model_type, kind):
        row = guarded(model_type, kind, variation=variation)
        single = [] if row.verdict == "equal" else variation.single()
        parts = [guarded(model_type, kind, variation=each) for each in single] if len(single) > 1 else []
        rows += parts if any(part.verdict == row.verdict for part in parts) else [row, *parts]
    return [row for row in rows if row.verdict != "same"]


def guarded(model_type: str, kind: str, *, variation: Variation | None = None) -> Row:
    """Return the row of `examine`, or a row that says what it raised."""
    try:
        return examine(model_type, kind, variation=variation)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:300]} ({at.filename}:{at.lineno})"
        return Row(model_type, kind, "crash", reason, variation="" if variation is None else variation.name)


def is_of_text(model_type: str, kind: str) -> bool:
    """Return whether the configuration of a model type states a vocabulary; true if it cannot be built to tell."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet():
        try:
            config = small_config(CONFIG_MAPPING[model_type], OVERRIDES.get(f"{kind}:{model_type}", {}))
        except Exception:
            return True
    return states_vocabulary(config.to_dict())


def judge(row: Row) -> None:
    """Set the verdict of a row whose comparisons are done, unless its type is refused or cannot run."""
    if row.verdict in ("refused", "not built", NO_VOCABULARY):
        return
    differing = [f"{name} {value:.1e}" for name, value in row.differences.items() if value > limit_of(name)]
    missing = [name for name in COMPULSORY[row.kind] if name not in row.differences and name not in row.allowed]
    if differing or missing:
        row.verdict = "wrong"
        row.reason = "; ".join(
            [f"differs: {', '.join(differing)}"] * bool(differing)
            + [f"{name} was not compared: {row.left_out.get(name, 'not seen')}" for name in missing]
        )


def limit_of(name: str) -> float:
    """Return the largest relative difference of a comparison that counts as equal."""
    return {"patched loss": LOSS_LIMIT, "patched gradients": GRADIENT_LIMIT}.get(name, LIMIT)


def compare(row: Row, model: nn.Module, layer: el.EmbeddingLayer) -> None:
    """Compare a loaded layer with its model, and note the differences in the row."""
    ids, mask = texts(model.config)
    decoder_ids = ids.flip(1)
    cases: dict[str, dict[str, Any]] = {"input": {}, "input, padded": {"attention_mask": mask}}
    if takes(model, "position_ids") and not accepts(model, "decoder_input_ids"):
        at = torch.arange(TOKENS) * 2 + layer.first_position_id + 3
        cases["input, position_ids"] = {"position_ids": at.expand(2, -1)}
    if takes(model, "token_type_ids"):
        cases["input, token_type_ids"] = {"token_type_ids": (torch.arange(TOKENS) // 5 % 2).expand(2, -1)}
    for name, options in cases.items():
        try:
            run = observe(model, text_inputs(model, ids, decoder_ids, **options))
        except Exception as error:
            row.left_out[name] = f"transformers: {type(error).__name__}: {str(error)[:200]}"
            if name == "input":
                row.verdict, row.reason = "not built", f"its forward fails: {row.left_out[name]}"
                return
            continue
        stacks = main_stacks(model, run)
        if not accepts(model, "decoder_input_ids"):
            stacks = stacks[:1]  # the decoder of FastSpeech 2 gets no tokens
        if not stacks:
            row.left_out[name] = "no block was seen"
            continue
        if "token_type_ids" in options and "types" not in layer.recipe:
            options = {}
        of_decoder = decoder_ids
        own = ids
        if layer.codes is not None and "codes" not in layer.recipe:
            count = layer.codes.table.num_streams
            if layer.decoder is None:
                own = codes_of(ids, count)
            else:
                of_decoder = codes_of(decoder_ids, count)
        with torch.no_grad():
            row.differences[name] = input_difference(row, layer.input(own, **options), run, stacks[0])
            if len(stacks) > 1:
                ours = layer.decoder_input(of_decoder)
                row.differences[f"decoder {name}"] = input_difference(row, ours, run, stacks[1])
        if name == "input":
            compare_head(row, layer, run)
            compare_positions(row, model, layer, run, stacks)
            if model.config.model_type in PLACED:
                compare_placed_codes(row, model, layer, ids)


def compare_placed_codes(row: Row, model: nn.Module, layer: el.EmbeddingLayer, ids: Tensor) -> None:
    """Compare the input, and the heads of codes, of a model that has codes in place of all tokens."""
    run = observe(model, code_inputs(model, ids))
    assert layer.codes is not None
    placed = torch.full_like(ids, layer.codes.placeholders[0])
    with torch.no_grad():
        ours = layer.input(placed, codes=codes_of(ids, layer.codes.table.num_streams))
        row.differences["input, codes"] = input_difference(row, ours, run, main_stacks(model, run)[0])
    compare_head(row, layer, run)


def input_difference(row: Row, ours: Tensor, run: Run, stack: str) -> float:
    """Return the difference of the input of the first block of a stack.

    A block may get several streams. All equal ours, or the first does and the others are computed from it: then that is
    noted.
    """
    block = run.stacks[stack][min(run.stacks[stack])]
    theirs = arranged(block.state, (ours.shape[0], ours.shape[1], ours.shape[2]))
    if theirs is None:
        return float("inf")
    differences = [relative(ours, each) for each in theirs]
    if max(differences) > LIMIT >= differences[0]:
        row.left_out["other streams"] = f"streams 2 to {len(theirs)} of {stack} are computed from the first"
        return differences[0]
    return max(differences)


def compare_head(row: Row, layer: el.EmbeddingLayer, run: Run) -> None:
    """Compare the logits for the hidden states that enter the head."""
    if layer.codes is not None and layer.codes.head is not None and run.logits is not None and run.hidden is not None:
        with torch.no_grad():
            row.differences["head"] = code_logits_difference(layer.codes.head(run.hidden), run.logits)
        return
    if layer.head is None and run.logits is None and "head" not in COMPULSORY[row.kind]:
        return  # neither has a head
    if layer.head is None:
        row.left_out["head"] = "no head was loaded"
    elif run.logits is None and "head" not in COMPULSORY[row.kind]:
        if any(name.startswith("head.") for name in layer.tensor_names):
            row.left_out["head"] = "the model stores it, and returns no logits"
        else:
            row.left_out["head"], row.differences["head"] = "the model has no head", float("inf")
    elif run.hidden is None or run.logits is None:
        row.left_out["head"] = "the input of the head was not seen"
    else:
        hidden = run.hidden[:, 0] if run.hidden.dim() > run.logits.dim() else run.hidden  # the first of several streams
        with torch.no_grad():
            row.differences["head"] = relative(layer.head(hidden), run.logits)


def code_logits_difference(ours: Sequence[Tensor], theirs: Tensor) -> float:
    """Return the difference of the logits of K streams, which a model joins: `(B K, T, V)` or `(B, T, K, V)`."""
    joined = [torch.cat(list(ours), -1)]
    if len({each.shape for each in ours}) == 1:
        joined += [torch.stack(list(ours), 1).flatten(0, 1), torch.stack(list(ours), 2)]
    return next((relative(each, theirs) for each in joined if each.shape == theirs.shape), float("inf"))


def compare_final_norm(row: Row, model: nn.Module, folder: str) -> None:
    """Compare the norm between the last block and the head, and the windows of attention."""
    try:
        layer = el.load(folder, final_norm=True)
    except el.core.errors.CheckpointError as error:
        row.left_out["final norm"] = str(error).replace(folder, "...")
        return
    ids, _ = texts(model.config)
    run = observe(model, text_inputs(model, ids, ids.flip(1)))
    stacks = main_stacks(model, run)
    blocks = run.stacks[stacks[-1]] if stacks else {}
    output = blocks[max(blocks)].output if blocks else None
    if output is None or run.hidden is None or output.shape != run.hidden.shape:
        row.left_out["final norm"] = "the output of the last block or the input of the head was not seen"
    else:
        with torch.no_grad():
            ours = output if layer.final_norm is None else layer.final_norm(output)
        row.differences["final norm"] = relative(ours, run.hidden)
    windows = {i: getattr(block.module, "self_attn", None) for i, block in blocks.items()}
    windows = {i: attention for i, attention in windows.items() if hasattr(attention, "sliding_window")}
    if windows and layer.layer_types:
        with suppress(el.core.errors.SizeError):  # a type of attention that has no window
            found = {
                i: each.sliding_window if getattr(each, "is_sliding", True) else None for i, each in windows.items()
            }
            equal = all(layer.window_of_block(i) == window for i, window in found.items())
            row.differences["windows"] = 0.0 if equal else float("inf")


def compare_training(row: Row, model: nn.Module) -> None:
    """Compare a model with its patched copy, and count operations as large as all logits."""
    part = PARTS.get(row.model_type, "")
    try:
        result = compare_patched(model.get_submodule(part))
    except el.core.errors.EmbedLayerError as error:
        row.left_out["patched loss"] = f"patch: {error}"
        if row.verdict != "refused":
            row.verdict, row.reason = "refused", f"patch: {error}"
        return
    except Exception as error:
        own = own_error(build(row.model_type, row.kind, row.settings)[1].get_submodule(part))
        row.left_out["patched loss"] = own or f"{type(error).__name__}: {str(error)[:200]}"
        row.allowed += ["patched loss"] * bool(own)
        return
    row.differences |= result.differences
    row.left_out |= result.left_out
    row.without_logits = result.without_logits if "patched gradients" in result.differences else None
    row.large = result.reader or ", ".join(result.large)
    if not accepts(model, "labels") and "patched loss" in result.left_out:
        row.allowed.append("patched loss")


def own_error(model: nn.Module) -> str:
    """Return why a plain model cannot compute a loss from text alone; empty if it can."""
    try:
        with torch.no_grad():
            model(**batch())
    except Exception as error:
        return f"transformers: {type(error).__name__}: {str(error)[:200]}"
    return ""


# Positions of every block


def compare_positions(row: Row, model: nn.Module, layer: el.EmbeddingLayer, run: Run, stacks: list[str]) -> None:
    """Compare the positions of every block of the last stack, and biases."""
    compare_biases(row, model, layer, run, stacks)
    at = torch.arange(TOKENS)
    if takes(model, "position_ids") and any(scheme.hook == "rotate" for scheme in schemes_of(layer)):
        ids, _ = texts(model.config)  # PaliGemma counts from 1, which no score shows
        run = observe(model, text_inputs(model, ids, position_ids=at.expand(2, -1)))
    blocks = run.stacks[stacks[-1]]
    row.differences["positions"] = rotation_difference(row, layer, blocks, at)
    axes = {
        scheme.axes.num_axes for scheme in schemes_of(layer) if isinstance(scheme, el.RotaryEmbedding) and scheme.axes
    }
    for count in axes if takes(model, "position_ids") else ():
        compare_axes(row, model, layer, stacks[-1], count)
    if not row.far:
        return
    if not takes(model, "position_ids"):
        if any(scheme.hook == "rotate" for scheme in schemes_of(layer)):
            row.left_out["long positions"] = "forward takes no position_ids"
        return
    try:
        wide = widened(row, model)
        short = observed_at(wide, BASE)
    except Exception as error:
        row.left_out["long positions"] = f"in float64: {type(error).__name__}: {str(error)[:200]}"
        return
    for start in STARTS:
        name, at = f"positions from {start}", torch.arange(start, start + TOKENS)
        try:
            long = observed_at(wide, at, short)
        except (IndexError, RuntimeError, ValueError) as error:  # beyond a table of positions
            if start > STARTS[0] and any(scheme.hook == "rotate" for scheme in schemes_of(layer)):
                row.left_out[name] = f"transformers: {type(error).__name__}: {str(error)[:100]}"
            continue
        row.differences[name] = rotation_difference(row, layer, long.stacks[stacks[-1]], at)
        scale = query_scale_difference(row, layer, short.stacks[stacks[-1]], long.stacks[stacks[-1]], at)
        unrotated = any(block.queries and is_unrotated(layer.position_of_block(i)) for i, block in blocks.items())
        if unrotated:  # Llama 4 scales by the length of the cache, not by position_ids
            with suppress(Exception):
                long = observed_at(wide, at, short, with_cache=True)
                cached = query_scale_difference(row, layer, short.stacks[stacks[-1]], long.stacks[stacks[-1]], at)
                scale = scale if cached is None else cached
        if scale is not None:
            row.differences["query scale"] = max(scale, row.differences.get("query scale", 0.0))


def compare_axes(row: Row, model: nn.Module, layer: el.EmbeddingLayer, stack: str, count: int) -> None:
    """Compare the rotations of blocks with several position axes, at positions that differ by axis and text."""
    ids, _ = texts(model.config)
    tokens, text = torch.arange(TOKENS), torch.arange(len(ids))[:, None]
    at = torch.stack([(tokens * (2 * axis + 1) + text) % (11 + axis) for axis in range(count)])
    run = observe(model, text_inputs(model, ids, position_ids=at))
    blocks = {
        index: block
        for index, block in run.stacks[stack].items()
        if getattr(layer.position_of_block(index), "axes", None) is not None
    }
    row.differences[f"positions on {count} axes"] = rotation_difference(row, layer, blocks, at)


def is_unrotated(position: el.Position) -> bool:
    """Return whether a scheme neither rotates, adds to the input nor biases; it may scale queries."""
    return not isinstance(position, el.RotaryEmbedding) and position.hook in (None, "rotate")


def schemes_of(layer: el.EmbeddingLayer) -> list[el.Position]:
    return [layer.position_of(kind or None) for kind in ("", *layer.other_positions)]


def widened(row: Row, model: nn.Module) -> nn.Module:
    """Return the same model, built and run in float64."""
    with in_float64():
        _, whole = build(row.model_type, row.kind, row.settings)
    wide = whole.get_submodule(row.part)
    wide.double().load_state_dict(model.state_dict(), strict=False)
    return wide


def observed_at(wide: nn.Module, at: Tensor, states: Run | None = None, *, with_cache: bool = False) -> Run:
    """Run a model in float64 at positions, with the hidden states of an earlier run.

    With `with_cache`, the model also gets a cache that claims to have the earlier positions, and has no keys.
    """
    ids, _ = texts(wide.config)
    with in_float64():
        inputs = text_inputs(wide, ids, position_ids=at.expand(2, -1))
    if with_cache:
        inputs["past_key_values"] = empty_cache(int(at[0]))
    if accepts(wide, "decoder_position_ids"):
        inputs["decoder_position_ids"] = at.expand(2, -1)
    with in_float64():
        return observe(wide, inputs, states=states)


def empty_cache(start: int) -> Any:
    """Return a cache of transformers that claims to have `start` positions, and stores nothing."""
    from transformers.cache_utils import DynamicCache

    class EmptyCache(DynamicCache):
        def get_seq_length(self, *_: Any) -> int:
            return start

        get_query_offset = get_seq_length

        def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
            return query_length, start

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    return EmptyCache()


def rotation_difference(row: Row, layer: el.EmbeddingLayer, blocks: Mapping[int, Block], at: Tensor) -> float:
    """Return the largest difference of rotated queries and keys over all blocks."""
    worst = 0.0
    for index, block in blocks.items():
        position = layer.position_of_block(index)
        calls = [call for call in block.rotations if not OTHER_ROTATIONS.search(call.owner)]
        if len(calls) < len(block.rotations):
            owners = sorted({call.owner for call in block.rotations if OTHER_ROTATIONS.search(call.owner)})
            row.left_out[", ".join(owners)] = "rotations outside of attention"
        if block.queries and any(call.attentions == len(block.queries) for call in calls):
            row.left_out["rotations of the output of attention"] = "there is no such rotation here"
            calls = [call for call in calls if call.attentions < len(block.queries)]
        pairs = [
            (by_token(before), by_token(after))
            for call in calls
            for before, after in zip(call.before, call.after, strict=True)
        ]
        pairs = [(before, after) for before, after in pairs if before is not None and after is not None]
        rotates = isinstance(position, el.RotaryEmbedding)
        if rotates != bool(pairs):
            row.left_out[f"positions of block {index}"] = (
                f"ours {'rotates' if rotates else 'does not rotate'}, theirs {'does' if pairs else 'does not'}"
            )
            return float("inf")
        for before, after in pairs:
            difference = min(relative(each, after) for each in rotated(position, before, at))
            if difference > max(worst, LIMIT):
                row.left_out["largest difference of positions"] = f"block {index}, {calls[0].function}, {position!r}"
            worst = max(worst, difference)
    return worst


def by_token(x: Tensor) -> Tensor | None:
    """Return queries or keys as `(B, H, T, K)`; `None` if they are not those of each token."""
    dims = [dim for dim in range(x.dim() - 1) if x.shape[dim] == TOKENS]
    if not dims:
        return None
    x = x.movedim(dims[-1], -2)
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(1, -3)


def rotated(position: el.RotaryEmbedding, x: Tensor, at: Tensor) -> list[Tensor]:
    """Return rotated keys in the layouts in which a family may return them.

    A family may pass only the rotated channels of a head. It may also return interleaved pairs in the half-split
    layout, which does not change a score, as queries and keys are permuted alike.
    """
    others = position.head_dim - x.shape[-1]
    if others and x.shape[-1] != position.rotary_dim:
        return [x.new_full((), float("inf"))]
    pad = (others, 0) if position.trailing else (0, others)
    x = torch.nn.functional.pad(x.float(), pad)
    keys = position.rotate(x, x, at)[1]
    keys = keys[..., others:] if position.trailing else keys[..., : keys.shape[-1] - others]
    return [keys, torch.cat((keys[..., ::2], keys[..., 1::2]), -1)] if position.interleaved else [keys]


def query_scale_difference(
    row: Row, layer: el.EmbeddingLayer, short: Mapping[int, Block], long: Mapping[int, Block], at: Tensor
) -> float | None:
    """Return the largest difference of the factors by which queries are longer at long positions than at short ones.

    `None` if no block shows its queries. A block that rotates nothing and does not scale must give the same output at
    all positions.
    """
    found: list[float] = []
    for index, block in long.items():
        position, earlier = layer.position_of_block(index), short.get(index)
        if earlier is None or earlier.state.shape != block.state.shape:
            continue
        if type(position) is el.Position and block.output is not None and earlier.output is not None:
            found.append(relative(block.output, earlier.output))
        for one, two in zip(earlier.queries, block.queries, strict=False):
            if one.shape != two.shape or one.shape[-2] != TOKENS:
                continue
            theirs = two.norm(dim=-1) / one.norm(dim=-1)
            ours = factors(position, at) / factors(position, BASE)
            difference = relative(ours.expand_as(theirs), theirs)
            if difference > LIMIT and is_normalised(block, two):
                row.left_out["query scale"] = "a norm with weights follows the rotation, so lengths change with it"
            else:
                found.append(difference)
    return max(found, default=None)


def is_normalised(block: Block, queries: Tensor) -> bool:
    """Return whether the queries of attention are no multiples of the rotated ones: a norm with weights is between."""
    for call in block.rotations:
        after = by_token(call.after[0])
        if after is not None and after.shape == queries.shape:
            ratio = queries / after
            return relative(ratio, ratio[..., :1].expand_as(ratio)) > LIMIT
    return False


def factors(position: el.Position, at: Tensor) -> Tensor:
    """Return the factor of a query at each position, `(T,)`."""
    width = getattr(position, "head_dim", 2)
    ones = torch.ones(1, 1, len(at), width)
    queries, keys = position.rotate(ones, ones, at)
    return (queries.norm(dim=-1) / keys.norm(dim=-1))[0, 0]


def compare_biases(row: Row, model: nn.Module, layer: el.EmbeddingLayer, run: Run, stacks: list[str]) -> None:
    """Compare the biases of attention scores of all blocks of each stack with those of the blocks' schemes.

    A block without a bias of its own uses that of an earlier block (T5).
    """
    for number, stack in enumerate(stacks):
        encoder = number < len(stacks) - 1
        schemes: dict[el.Position, list[Tensor]] = {}
        for index, block in run.stacks[stack].items():
            schemes.setdefault(layer.position_of_block(index, encoder=encoder), []).extend(block.biases)
        for position, own in schemes.items():
            compare_bias(row, model, f"bias of {stack}", position, own or run.biases)


def compare_bias(row: Row, model: nn.Module, name: str, position: el.Position, theirs: list[Tensor]) -> None:
    """Compare the bias of a position scheme with those that a model computed in the blocks of that scheme."""
    if position.hook == "bias" and not theirs:  # BLOOM calls its function only where there is a mask
        ids, _ = texts(model.config)
        theirs = observe(model, text_inputs(model, ids, attention_mask=torch.ones_like(ids))).biases
    if position.hook == "bias":
        if theirs:
            if model.config.model_type in SCALED_BIAS:
                theirs = [each / model.config.head_dim**0.5 for each in theirs]
            with torch.no_grad():
                worst = max(bias_difference(bias_like(position, each), each) for each in theirs)
            row.differences[name] = max(worst, row.differences.get(name, 0.0))
        else:
            row.left_out[name] = "no function that computes it was seen"
            row.differences[name] = float("inf")
    elif theirs:
        row.left_out[name] = "there is no such bias here"


def bias_like(position: el.Position, theirs: Tensor) -> Tensor:
    """Return the bias of a scheme for the queries and keys of another bias.

    Windows of n queries see the keys of three windows, `(..., n, 3n)` (LongT5); others all keys, `(..., T, T)`.
    """
    window = theirs.shape[-2]
    if theirs.shape[-1] == 3 * window:
        bias = position.bias(torch.arange(window, 2 * window), torch.arange(3 * window))
    else:
        bias = position.bias(torch.arange(TOKENS), torch.arange(TOKENS))
    assert bias is not None
    return bias


def bias_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the difference of biases `(1, H, T, T)`.

    A linear bias may also be `(..., T)` for the keys alone; then both are compared without the term that is equal for
    all keys of a query, for keys up to the query.
    """
    heads, tokens = ours.shape[1], ours.shape[-1]
    if theirs.shape[-2:] == ours.shape[-2:] and theirs.shape[-1] != theirs.shape[-2]:
        return max(relative(ours[0], each) for each in theirs.reshape(-1, *ours.shape[1:]))
    theirs = theirs[..., -tokens:]
    if theirs.numel() % (heads * tokens * tokens) == 0 and theirs.shape[-2] == tokens:
        return max(relative(ours[0], each) for each in theirs.reshape(-1, heads, tokens, tokens))
    keys = theirs.reshape(-1, heads, 1, tokens)
    wide = keys - keys.transpose(-1, -2)
    return max(relative(ours[0].tril(), each.tril()) for each in wide)


# Running all types


def _child(model_type: str, kind: str, is_varied: bool, pipe: Any) -> None:
    """Examine a type in a process of its own, and send its rows."""
    torch.set_num_threads(1)
    seconds = SECONDS * (VARIED_TIMES if is_varied else 1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, -1))
    start = time.process_time()
    rows = examine_varied(model_type, kind) if is_varied else [guarded(model_type, kind)]
    rows[0].seconds = round(time.process_time() - start, 2)
    pipe.send(rows)
    pipe.close()
    os._exit(0)


def run(work: Sequence[tuple[str, str]], jobs: int = 2, *, is_varied: bool = False) -> Iterator[Row]:
    """Yield the rows of each `(model_type, kind)`, each examined in a forked process, in the order of `work`.

    Args:
        work: Model types and kinds.
        jobs: Processes.
        is_varied: Whether the variations of each type are examined, in place of its default settings.
    """
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401 (imported once, before the forks)

    context = multiprocessing.get_context("fork")
    running: list[tuple[tuple[str, str], Any, Any]] = []
    waiting = list(work)
    while waiting or running:
        while waiting and len(running) < jobs:
            item = waiting.pop(0)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(*item, is_varied, send), daemon=True)
            process.start()
            send.close()
            running.append((item, process, receive))
        item, process, receive = running.pop(0)
        try:
            rows = receive.recv()
        except EOFError:
            process.join()
            is_late = process.exitcode == -signal.SIGXCPU
            reason = "took too much processor time" if is_late else f"the process ended with code {process.exitcode}"
            rows = [Row(*item, "crash", reason)]
        process.kill()
        process.join()
        yield from rows


def shown(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = ", ".join(f"{name} {value:.1e}" for name, value in row.differences.items())
    left = "".join(f" [{name} left out: {why}]" for name, why in row.left_out.items())
    kept = {True: "; trains without logits", False: f"; reads logits: {row.large}", None: ""}[row.without_logits]
    name = f"{row.kind:10s} {row.model_type:24s}"
    if row.variation:
        changes = f" {dict(row.settings)}" if row.verdict in ("wrong", "crash") else ""
        return f"{name} {row.variation:30s} {row.verdict:9s}  {row.reason}{changes}{left if row.reason else ''}"
    return f"{name} {row.verdict:9s} {row.seconds:5.1f}s  {row.reason or numbers}{left}{kept}"


# The page


def page_text(rows: Sequence[Row]) -> str:
    """Return the counts and the tables of `docs/families.md`."""
    import transformers

    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    counts = []
    for kind in kinds:
        own = [row for row in rows if row.kind == kind]
        losses = [row.without_logits for row in own if row.without_logits is not None]
        counts.append(
            {"kind": kind, "model types": str(len(own))}
            | {verdict: str(sum(row.verdict == verdict for row in own)) for verdict in VERDICTS}
            | {
                "compute a loss": str(len(losses)),
                "without logits": str(sum(losses)),
            }
        )
    text = markdown_table(counts)
    text += f"\ntransformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}.\n"
    notes: dict[str, int] = {}
    for kind in kinds:
        own = [row for row in rows if row.kind == kind]
        text += f"\n## {TITLES[kind]}\n\n" + markdown_table([page_row(row, notes) for row in own])
    text += "\n## Notes\n\n" + "".join(f"{number}. {note}\n" for note, number in notes.items())
    return text


def further_text(rows: Sequence[Row]) -> str:
    """Return the counts and the tables of the further kinds of `docs/families.md`."""
    import transformers

    kinds = [kind for kind in FURTHER_KINDS if any(row.kind == kind for row in rows)]
    verdicts = (*VERDICTS, NO_VOCABULARY)
    counts, tables = [], ""
    notes: dict[str, int] = {}
    for kind in kinds:
        own = [row for row in rows if row.kind == kind]
        count = {verdict: str(sum(row.verdict == verdict for row in own)) for verdict in verdicts}
        counts.append({"kind": kind, "model types": str(len(own))} | count)
        rest = [f"`{row.model_type}`" for row in own if row.verdict == NO_VOCABULARY]
        named = [page_row(row, notes) for row in own if row.verdict != NO_VOCABULARY]
        left_out = ("patched", "loss without logits")
        named = [{key: value for key, value in row.items() if key not in left_out} for row in named]
        tables += f"\n## {TITLES[kind]}\n\n" + (markdown_table(named) if named else "")
        tables += f"\nWithout a vocabulary: {', '.join(rest)}.\n" if rest else ""
    text = markdown_table(counts)
    text += f"\ntransformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}.\n" + tables
    text += "\n## Notes on the further kinds\n\n"
    return text + "".join(f"{number}. {note}\n" for note, number in notes.items())


def varied_text(rows: Sequence[Row]) -> str:
    """Return the table of `docs/families.md` that counts the variations."""
    counts = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        counts.append(
            {"kind": kind, "model types": str(len({row.model_type for row in own})), "variations": str(len(own))}
            | {verdict: str(sum(row.verdict == verdict for row in own)) for verdict in VERDICTS}
        )
    return markdown_table(counts)


def page_row(row: Row, notes: dict[str, int]) -> dict[str, str]:
    """Return the row of a model type in a table of the page.

    Args:
        row: Result of the model type.
        notes: Reason -> its number; new reasons are added.
    """
    reasons = [row.reason] * bool(row.reason) if row.verdict != "equal" else []
    reasons += [] if row.verdict == "not built" else [f"{name}: {why}" for name, why in row.left_out.items()]
    numbers = [notes.setdefault(" ".join(reason.split()).replace("|", "\\|"), len(notes) + 1) for reason in reasons]
    return {
        "model type": f"`{row.model_type}`",
        "result": row.verdict,
        "first block's input": largest(row, "input", "decoder input"),
        "positions": largest(row, "positions", "query scale", "bias"),
        "head": largest(row, "head"),
        "patched": largest(row, "patched"),
        "loss without logits": {True: "yes", False: f"no: {row.large}", None: "-"}[row.without_logits],
        "notes": ", ".join(str(number) for number in numbers),
    }


def largest(row: Row, *prefixes: str) -> str:
    """Return the largest difference of the comparisons whose names start with one of the prefixes, as text."""
    found = [value for name, value in row.differences.items() if name.startswith(prefixes)]
    return "-" if not found else "0" if max(found) == 0 else f"{max(found):.0e}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types or kinds; all by default")
    parser.add_argument("--varied", action="store_true", help="other settings than the default ones, without training")
    every = {**KINDS, **FURTHER_KINDS}
    parser.add_argument("--kind", action="append", choices=list(every), help="kinds of models; language models else")
    parser.add_argument("--further", action="store_true", help="the further kinds, such as base models and sound")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON lines; - for standard output")
    parser.add_argument("--rows", type=Path, help="file that --json wrote: use its rows, and run named types alone")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args(argv)
    default = list(FURTHER_KINDS if options.further else KINDS)
    kinds = options.kind or [name for name in options.types if name in every] or default
    names = [name for name in options.types if name not in every]
    stored = [] if options.rows is None else [Row(**json.loads(line)) for line in options.rows.read_text().splitlines()]
    work = [(name, kind) for kind in kinds for name in model_types(kind) if not names or name in names]
    work = [] if stored and not options.types else work
    start = time.monotonic()
    rows = [row for row in stored if (row.model_type, row.kind) not in work]
    for row in run(work, options.jobs, is_varied=options.varied) if work else rows:
        rows += [row] * bool(work)
        print(json.dumps(asdict(row)) if str(options.json) == "-" else shown(row), flush=True)
    order = [(name, kind) for kind in every for name in model_types(kind)]
    rows.sort(key=lambda row: order.index((row.model_type, row.kind)))
    if options.json and str(options.json) != "-":
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        verdicts = [row.verdict for row in own]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
        training = f"; {training_count(own)}" if kind in KINDS and not options.varied else ""
        what = "variations" if options.varied else "types"
        print(f"{kind}: {len(own)} {what}: {counts}{training}", file=sys.stderr)
    print(
        f"{time.monotonic() - start:.0f} s, {sum(row.seconds for row in rows):.0f} s of them computing", file=sys.stderr
    )
    if options.write and options.varied:
        write_between_markers(options.write, "varied", varied_text(rows))
    elif options.write:
        for marker, text, own in (("families", page_text, KINDS), ("further", further_text, FURTHER_KINDS)):
            named = [row for row in rows if row.kind in own]
            if named:
                write_between_markers(options.write, marker, text(named))
    if any(row.verdict in ("wrong", "crash") for row in rows):
        raise SystemExit(1)


def training_count(rows: Sequence[Row]) -> str:
    """Return how many model types compute a loss, and how many of them do it without logits after `patch`."""
    losses = [row.without_logits for row in rows if row.without_logits is not None]
    return f"{sum(losses)} of {len(losses)} that compute a loss train without logits"


if __name__ == "__main__":
    main()
