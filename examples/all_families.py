"""Compare the loaded embedding layer of every model type of transformers with the original model.

    python examples/all_families.py                       # every type of every kind
    python examples/all_families.py llama bert --json -   # a few, as JSON lines
    python examples/all_families.py --kind causal --write docs/families.md

A small random model of each type (`tiny_models`) is saved, its embedding layer is loaded, and both compute the same in
float32. A type is

- equal, if every comparison that applies ran and its largest relative difference is at most 1e-6. The relative
  difference is `max |ours - theirs| / max |theirs|`;
- refused, if `embedlayer.load` does not read it, or reads the table alone;
- wrong, if a comparison differs;
- not built, if transformers cannot build it from such a configuration.

Comparisons: the input of the first block (`input`; also with left padding, `position_ids` and `token_type_ids`), the
output of the head for the hidden states that enter it (`head`).
"""

import argparse
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import KINDS, CannotBuild, build, model_types, quiet
from torch import Tensor, nn

import embedlayer as el

LIMIT = 1e-6
"""Largest relative difference in float32 that counts as equal."""

TOKENS, PADDED = 13, 4
"""Tokens of a text, and number of padding tokens in front of the second text."""

SECONDS = 60
"""Time limit of one model type."""


@dataclass
class Row:
    """Result of one model type.

    Attributes:
        model_type: Model type in transformers.
        kind: A key of `tiny_models.KINDS`.
        verdict: `"equal"`, `"refused"`, `"wrong"`, `"not built"` or `"crash"`.
        reason: Sentence that explains a verdict other than `"equal"`.
        differences: Comparison -> largest relative difference.
        left_out: Comparison -> why it was not made.
        seconds: Time for the whole type.
    """

    model_type: str
    kind: str
    verdict: str = "equal"
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Seen:
    """What a forward pass of transformers was seen to compute.

    Attributes:
        inputs: Input of the first block of each stack, in the order of their calls.
        hidden: Input of the head.
        logits: Output of the model.
    """

    inputs: list[Tensor]
    hidden: Tensor | None
    logits: Tensor


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return `max |ours - theirs| / max |theirs|`; infinity for different shapes or NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    difference = ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30)).item()
    return difference if difference == difference else float("inf")


def blocks_of(model: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """Return each element of each `nn.ModuleList` of a model: name of the list and index in it."""
    return {
        block: (name, index)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, block in enumerate(module)
    }


def hidden_states(arguments: Iterable[Any], width: int) -> Tensor | None:
    """Return the first argument that may be the hidden states of a block: floats of this many tokens."""
    for value in arguments:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3 and width in value.shape:
            return value
    return None


def observe(model: nn.Module, inputs: Mapping[str, Any]) -> Seen:
    """Run a model and return the inputs of its first blocks, the input of the head, and the logits."""
    places = blocks_of(model)
    tokens = inputs["input_ids"].shape[-1]
    firsts: dict[str, Tensor] = {}
    running: list[str] = []
    handles = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, index = places[module]
        if not running and name not in firsts:
            state = hidden_states((*args, *kwargs.values()), tokens)
            if state is not None and index == 0:
                firsts[name] = state.detach().clone()
        running.append(name)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    seen: dict[str, Tensor] = {}

    def base(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        seen["hidden"] = state.detach().clone()

    for block in places:
        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after))
    handles.append(model.base_model.register_forward_hook(base))
    try:
        with torch.no_grad():
            logits = logits_of(model(**inputs))
    finally:
        for handle in handles:
            handle.remove()
    return Seen(list(firsts.values()), seen.get("hidden") if model.base_model is not model else None, logits)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output."""
    return output.logits if hasattr(output, "logits") else output["prediction_logits"]


def accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def texts(config: Any) -> tuple[Tensor, Tensor]:
    """Return two texts, the second one left-padded, and their attention mask."""
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 100, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    ids[1, :PADDED] = pad if isinstance(pad, int) else 1
    return ids, mask


def examine(model_type: str, kind: str) -> Row:
    """Return the row of a model type."""
    row = Row(model_type, kind)
    try:
        config, model = build(model_type, kind)
    except CannotBuild as error:
        row.verdict, row.reason = "not built", str(error)
        return row
    with tempfile.TemporaryDirectory() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.save_pretrained(folder)
        except Exception as error:
            row.verdict, row.reason = "not built", f"save_pretrained: {type(error).__name__}: {error}"
            return row
        try:
            layer = el.load(folder)
        except el.errors.EmbedLayerError as error:
            row.verdict, row.reason = "refused", str(error).replace(folder, "...")
            return row
        if layer.family == "unknown":
            row.verdict, row.reason = "refused", "the family is unknown, so load reads the table alone"
            return row
        compare(row, config, model, layer)
    if any(value > LIMIT for value in row.differences.values()):
        differing = [f"{name} {value:.1e}" for name, value in row.differences.items() if value > LIMIT]
        row.verdict, row.reason = "wrong", "differs: " + ", ".join(differing)
    return row


def compare(row: Row, config: Any, model: nn.Module, layer: el.EmbeddingLayer) -> None:
    """Make the comparisons of one type, and note them in its row."""
    ids, mask = texts(config)
    decoder = {"decoder_input_ids": ids.flip(1)} if accepts(model, "decoder_input_ids") else {}
    cases: dict[str, dict[str, Any]] = {"input": {}, "input, padded": {"attention_mask": mask}}
    if accepts(model, "position_ids"):
        cases["input, position_ids"] = {"position_ids": (torch.arange(TOKENS) * 2 + 7).expand(2, -1)}
    if accepts(model, "token_type_ids"):
        cases["input, token_type_ids"] = {"token_type_ids": (torch.arange(TOKENS) // 5 % 2).expand(2, -1)}
    for name, options in cases.items():
        try:
            seen = observe(model, {"input_ids": ids, **decoder, **options})
        except Exception as error:
            row.left_out[name] = f"transformers: {type(error).__name__}: {str(error)[:200]}"
            continue
        if not seen.inputs:
            row.left_out[name] = "no block was seen"
            continue
        if "token_type_ids" in options and "types" not in layer.recipe:
            options = {}
        with torch.no_grad():
            row.differences[name] = relative(layer.input(ids, **options), seen.inputs[0])
            if name == "input" and seen.hidden is not None and layer.head is not None:
                row.differences["head"] = relative(layer.head(seen.hidden), seen.logits)
    for name in ("input", "head"):
        if name not in row.differences:
            row.verdict = "wrong"
            row.left_out.setdefault(name, "no head was loaded" if layer.head is None else "not seen")
            row.reason = f"{name}: {row.left_out[name]}"


# Running all types


def _child(model_type: str, kind: str, pipe: Any) -> None:
    """Examine a type in a process of its own, and send its row."""
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        row = examine(model_type, kind)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        row = Row(model_type, kind, "crash", f"{type(error).__name__}: {str(error)[:300]} ({at.filename}:{at.lineno})")
    row.seconds = round(time.monotonic() - start, 2)
    pipe.send(row)
    pipe.close()
    os._exit(0)


def run(work: Sequence[tuple[str, str]], jobs: int = 2) -> Iterator[Row]:
    """Yield the row of each `(model_type, kind)`, each examined in a forked process, in the order of `work`."""
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401 (imported once, before the forks)

    context = multiprocessing.get_context("fork")
    running: list[tuple[tuple[str, str], Any, Any, float]] = []
    waiting = list(work)
    while waiting or running:
        while waiting and len(running) < jobs:
            item = waiting.pop(0)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(*item, send), daemon=True)
            process.start()
            send.close()
            running.append((item, process, receive, time.monotonic()))
        item, process, receive, start = running.pop(0)
        try:
            left = max(0.0, start + SECONDS - time.monotonic())
            row = receive.recv() if receive.poll(left) else Row(*item, "crash", f"took more than {SECONDS} s")
        except EOFError:
            process.join()
            row = Row(*item, "crash", f"the process ended with code {process.exitcode}")
        process.kill()
        process.join()
        yield row


def shown(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = ", ".join(f"{name} {value:.1e}" for name, value in row.differences.items())
    left = "".join(f" [{name} left out: {why}]" for name, why in row.left_out.items())
    return f"{row.kind:10s} {row.model_type:24s} {row.verdict:9s} {row.seconds:5.1f}s  {row.reason or numbers}{left}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; all by default")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="kinds of models; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON lines; - for standard output")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args(argv)
    kinds = options.kind or list(KINDS)
    work = [(name, kind) for kind in kinds for name in model_types(kind) if not options.types or name in options.types]
    rows = []
    for row in run(work, options.jobs):
        rows.append(row)
        print(json.dumps(asdict(row)) if str(options.json) == "-" else shown(row), flush=True)
    if options.json and str(options.json) != "-":
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    for kind in kinds:
        verdicts = [row.verdict for row in rows if row.kind == kind]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
        print(f"{kind}: {len(verdicts)} types: {counts}", file=sys.stderr)


if __name__ == "__main__":
    main()
