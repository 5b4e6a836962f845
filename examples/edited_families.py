"""Edit the vocabulary of a small random model of every model type of transformers, live and in its folder.

    python examples/edited_families.py                       # every type of every kind, all edits
    python examples/edited_families.py llama bert --json -   # a few, as JSON lines

Each model is patched, edited and saved; the folder that it was saved to before is edited too. The edits are `EDITS`:
all tokens permuted, some removed, some added. A result is

- equal, if the two saved models have equal tensors, configurations and generation configurations, if the logits of kept
  tokens and the greedily generated tokens are those before the edit, and if undo restores all of it;
- refused, if the edit raises an error of ours and changes nothing;
- wrong, if a comparison differs;
- not built, if transformers cannot build the model, or patch does not take it.
"""

import argparse
import inspect
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import KINDS, PARTS, CannotBuild, build, model_types, quiet
from torch import Tensor, nn

import embedlayer as el
from embedlayer.io.safetensors_files import load_tensors

EDITS = ("permute", "remove", "add")
"""All tokens are permuted; five are removed; three are added."""

LIMIT = 1e-5
"""Largest difference of logits of kept tokens, relative to the largest logit."""

TOKENS = 16
"""Tokens of a text."""

GENERATION = {
    "suppress_tokens": [7],
    "bad_words_ids": [[11], [12, 13]],
    "sequence_bias": [[[14], -3.0], [[15, 16], 4.0]],
}
"""Settings that name tokens, which each model that generates gets in its generation configuration."""


@dataclass
class Outcome:
    """Result of one edit of one model type.

    Attributes:
        kind: A key of `tiny_models.KINDS`.
        model_type: Model type in transformers.
        edit: One of `EDITS`.
        live: `"equal"`, `"refused"`, `"wrong"` or `"not built"`, for the live model.
        folder: The same for its folder.
        reasons: Reasons of refusals, and what is wrong, by `"live"` and `"folder"`.
        seconds: Processor time.
    """

    kind: str
    model_type: str
    edit: str
    live: str = "equal"
    folder: str = "equal"
    reasons: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def wrong(self, side: str, what: str) -> None:
        """Note a difference of one side, `"live"` or `"folder"`."""
        setattr(self, side, "wrong")
        self.reasons.setdefault(side, []).append(what)

    def refused(self, side: str, error: Exception) -> None:
        """Note that one side refuses the edit."""
        setattr(self, side, "refused")
        self.reasons.setdefault(side, []).append(f"{type(error).__name__}: {error}".partition("\n")[0])


def sources_of(edit: str, model: nn.Module, size: int) -> list[int]:
    """Return the old ID of each new token, without the added ones."""
    if edit == "permute":
        return torch.randperm(size, generator=torch.Generator().manual_seed(5)).tolist()
    if edit == "add":
        return [*range(size)]
    named = set(numbers(model.config.to_dict()))
    if getattr(model, "generation_config", None) is not None:
        named |= set(numbers(model.generation_config.to_dict()))
    unnamed = [token for token in range(20, size) if token not in named][:5]
    return [token for token in range(size) if token not in unnamed]


def numbers(value: Any) -> Iterator[int]:
    """Yield all whole numbers in a configuration."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each)
    elif type(value) is int:
        yield value


def apply(target: Any, edit: str, sources: Sequence[int], size: int, **options: Any) -> el.vocab.Receipt:
    """Apply an edit to a live model or a folder."""
    if edit == "permute":
        return el.vocab.edit_vocabulary(target, reorder=sources, **options)
    if edit == "remove":
        return el.vocab.remove_tokens(target, sorted({*range(size)} - {*sources}), **options)
    return el.vocab.add_tokens(target, 3, **options)


def texts(size: int) -> Tensor:
    """Return texts in which every ID occurs once."""
    rows = -(-size // TOKENS)
    ids = torch.arange(rows * TOKENS) % size
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))].view(rows, TOKENS)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor | str:
    """Return the logits of texts with equal inputs to encoder and decoder, or the error of the model."""
    inputs: dict[str, Any] = {"input_ids": ids}
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids.flip(0)
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            output = model(**inputs)
        found = output.logits if hasattr(output, "logits") else output["prediction_logits"]
        return found.detach().clone().view(-1, found.shape[-1])
    except Exception as error:  # what a model of transformers cannot compute is left out
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def generated(model: nn.Module, ids: Tensor) -> Tensor | str:
    """Return greedily generated IDs, or the error of the model."""
    if not hasattr(model, "generate") or getattr(model, "generation_config", None) is None:
        return "no generation"
    torch.manual_seed(0)
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=5)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the saved tensors of a model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def settings_of(model: nn.Module) -> list[Any]:
    """Return copies of all configurations of a model, and the whole numbers that its modules store."""
    configs = [part.config.to_dict() for part in model.modules() if hasattr(getattr(part, "config", None), "to_dict")]
    generation = [
        part.generation_config.to_dict()
        for part in model.modules()
        if getattr(part, "generation_config", None) is not None
    ]
    return [
        configs,
        generation,
        [
            {k: v for k, v in vars(part).items() if isinstance(v, int | list | dict) and not k.startswith("_")}
            for part in model.modules()
            if type(part).__module__.startswith("transformers.")
        ],
    ]


def files_of(folder: Path) -> dict[str, Any]:
    """Return the configurations and tensors of a saved model."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*config.json")):
        content = json.loads(file.read_text())
        found[file.name] = {key: value for key, value in content.items() if key not in VERSIONS}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_tensors(file)[0]
    return found


VERSIONS = ("transformers_version", "dtype", "torch_dtype", "architectures", "_from_model_config")


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two values differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}, key=str):
            if key not in one or key not in other:
                yield f"{path}.{key} {'missing' if key not in one else 'additional'}"
            else:
                yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not torch.equal(one, other):
            yield f"{path}"
    elif isinstance(one, list) and isinstance(other, list) and any(isinstance(x, Mapping) for x in [*one, *other]):
        if len(one) != len(other):
            yield path
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}[{number}]")
    elif one != other:
        yield f"{path} {one!r} != {other!r}"[:200]


def examine(model_type: str, kind: str, edit: str) -> Outcome:
    """Return the outcome of one edit of one model type."""
    outcome = Outcome(kind, model_type, edit)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as name, quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(outcome, Path(name))
        except (CannotBuild, NotBuilt) as error:
            outcome.live = outcome.folder = "not built"
            outcome.reasons = {"live": [str(error)]}
    outcome.seconds = round(time.process_time() - start, 2)
    return outcome


class NotBuilt(Exception):
    """patch does not take a model, or it cannot be saved."""


def compare(outcome: Outcome, folder: Path) -> None:
    """Edit a model and its folder, and note what differs."""
    _, whole = build(outcome.model_type, outcome.kind)
    model = whole.get_submodule(PARTS.get(outcome.model_type, ""))
    if getattr(model, "generation_config", None) is not None:
        for key, value in GENERATION.items():
            setattr(model.generation_config, key, value)
    try:
        el.patch(model)
        model.save_pretrained(folder / "before")
        size = el.vocab.live_modules.vocabulary_modules(model).vocab_size
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    sources = sources_of(outcome.edit, model, size)
    ids, prompt = texts(size), texts(size)[:2]
    before, tokens = logits_of(model, ids), generated(model, prompt)
    state, settings = state_of(model), settings_of(model)
    try:
        receipt = apply(model, outcome.edit, sources, size)
    except el.errors.EmbedLayerError as error:
        outcome.refused("live", error)
        for path in (*differences(state_of(model), state), *differences(settings_of(model), settings)):
            outcome.wrong("live", f"changed by a refused edit: {path}")
    else:
        compare_live(outcome, model, sources, before, tokens, ids, prompt)
        with suppress(Exception):
            model.save_pretrained(folder / "live")
        receipt.undo(model)
        for path in (*differences(state_of(model), state), *differences(settings_of(model), settings)):
            outcome.wrong("live", f"undo: {path}")
    try:
        apply(folder / "before", outcome.edit, sources, size, out=folder / "after")
    except el.errors.EmbedLayerError as error:
        outcome.refused("folder", error)
    else:
        el.vocab.Receipt.load(folder / "after" / "vocabulary-1.receipt").undo(folder / "after", out=folder / "undone")
        for path in differences(files_of(folder / "undone"), files_of(folder / "before")):
            outcome.wrong("folder", f"undo: {path}")
        if outcome.live != "refused":
            for path in differences(files_of(folder / "after"), files_of(folder / "live")):
                outcome.wrong("folder", f"folder != live: {path}")


def compare_live(
    outcome: Outcome,
    model: nn.Module,
    sources: Sequence[int],
    before: Tensor | str,
    tokens: Tensor | str,
    ids: Tensor,
    prompt: Tensor,
) -> None:
    """Compare logits and generated tokens of an edited live model with those before."""
    old = torch.tensor(sources)
    size = max(sources) + 1 if outcome.edit != "remove" else int(ids.max()) + 1
    new = torch.full((size,), -1)
    new[old] = torch.arange(len(old))
    rows = (new[ids] >= 0).all(1)
    if isinstance(before, Tensor):
        after = logits_of(model, torch.where(new[ids] >= 0, new[ids], 0))
        if isinstance(after, str):
            outcome.wrong("live", f"logits: {after}")
        else:
            seen = rows.repeat_interleave(ids.shape[1])
            if "decoder_input_ids" in inspect.signature(model.forward).parameters:
                seen &= rows.flip(0).repeat_interleave(ids.shape[1])
            kept = old[old < before.shape[1]]
            one, other = after[:, : len(kept)][seen], before[:, kept][seen]
            error = ((one - other).abs().max() / other.abs().max()).item() if len(one) else 0.0
            if not error <= LIMIT:
                outcome.wrong("live", f"logits differ by {error:.1e}")
    if isinstance(tokens, Tensor) and bool((new[prompt] >= 0).all()) and bool((new[tokens] >= 0).all()):
        after = generated(model, new[prompt])
        if isinstance(after, str):
            outcome.wrong("live", f"generation: {after}")
        elif outcome.edit != "add" and not torch.equal(after, new[tokens]):
            outcome.wrong("live", "generation differs")


def _child(work: Sequence[tuple[str, str, str]], queue: Any) -> None:
    """Examine types in a process of its own, and send their outcomes."""
    torch.set_num_threads(1)
    for model_type, kind, edit in work:
        try:
            outcome = examine(model_type, kind, edit)
        except Exception:
            outcome = Outcome(kind, model_type, edit, "crash", "crash", {"live": [traceback.format_exc()[-1500:]]})
        queue.put(outcome)
    queue.put(None)


def run(work: Sequence[tuple[str, str, str]], jobs: int = 2) -> Iterator[Outcome]:
    """Yield the outcome of each `(model_type, kind, edit)`, examined in so many forked processes."""
    import transformers.modeling_utils  # noqa: F401 (imported once, before the forks)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_child, args=(work[n::jobs], queue), daemon=True) for n in range(jobs)]
    for process in processes:
        process.start()
    ended = 0
    while ended < jobs:
        outcome = queue.get()
        ended += outcome is None
        if outcome is not None:
            yield outcome


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--kind", choices=[*KINDS])
    parser.add_argument("--edit", choices=EDITS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=argparse.FileType("w"), help="write the outcomes as JSON lines")
    arguments = parser.parse_args(argv)
    work = [
        (model_type, kind, edit)
        for kind in ([arguments.kind] if arguments.kind else KINDS)
        for model_type in model_types(kind)
        for edit in ([arguments.edit] if arguments.edit else EDITS)
        if not arguments.model_types or model_type in arguments.model_types
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in run(work, arguments.jobs):
        counts[outcome.edit, outcome.live, outcome.folder] += 1
        if arguments.json:
            print(json.dumps(asdict(outcome)), file=arguments.json, flush=True)
        else:
            print(outcome, flush=True)
    for key, count in sorted(counts.items()):
        print(*key, count, file=sys.stderr)


if __name__ == "__main__":
    main()
