"""Edit the vocabulary of a small random model of every model type of transformers, live and in its folder.

    python tools/edited_families.py                       # every type of every kind, all edits
    python tools/edited_families.py llama bert --json -   # a few, as JSON lines
    python tools/edited_families.py --write docs/vocabulary.md
    python tools/edited_families.py --read FILE --write docs/vocabulary.md   # outcomes that --json wrote

Each model is patched, edited and saved; the folder that it was saved to before is edited too. Its configuration there
leaves every second ID and size that is the default of its class to that class. Every saved tensor with an entry for
each token has random values, integers included. The edits are `EDITS`:
all tokens permuted, some removed, some added. A result is

- equal, if the two saved models have equal tensors, configurations and generation configurations, if the logits of kept
  tokens and the greedily generated tokens are those before the edit, if undo restores all of the live model, and if the
  source folder keeps every byte;
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
from patched_loss import relative
from tiny_models import KINDS, MORE_KINDS, PARTS, VOCAB, CannotBuild, build, model_types, quiet
from torch import Tensor, nn

import embedlayer as el
from embedlayer.io.safetensors_files import load_tensors

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from tables import markdown_table, write_between_markers

EDITS = ("permute", "remove", "add")
"""All tokens are permuted; five are removed; three are added."""

LIMIT = 1e-5
"""Largest difference of logits of kept tokens, relative to the largest logit."""

ID_ENDINGS = ("_id", "_ids", "_idx", "_index", "vocab_size", "num_embeddings", "out_features")
"""Ends of attributes that store IDs and sizes."""

REASONS = (
    ("positions from the ID of the padding", "positions are counted from the ID of the padding token, which moves"),
    ("hashes of token IDs", "rows are found by hashes of token IDs"),
    ("vocabulary_map", "tables are computed from `vocabulary_map` and read the order of its IDs"),
    ("for images or sounds", "IDs from a bound on are images or sounds"),
    ("do not share a vocabulary", "tables or heads have different numbers of rows"),
    ("the other rows are for", "tables or heads have different numbers of rows"),
    ("There is no token", "tables or heads have different numbers of rows"),
    ("beyond look-up and scale", "`patch` does not take the embedding, which computes more than look-up and scale"),
    ("get_input_embeddings", "`patch` finds no token embeddings"),
    ("not an nn.Embedding", "`patch` does not take the embedding, which is no `nn.Embedding`"),
    ("values for each token beside", "further tensors have values for each token"),
    ("New rows of", "further tensors have values for each token"),
    ("not known how its values belong", "further tensors have values for each token"),
    ("as many as there are tokens", "the family is unknown to `load`, and further tensors have as many rows"),
    ("no table of token rows", "`load` finds no table"),
    ("has several tables called", "the family is unknown to `load`, and there are several tables"),
    ("put together from several tensors", "rows are put together from several tensors"),
    ("do not belong together", "`load` does not read the table"),
    ("has no bias of the head", "`load` does not read the table without the head"),
)
"""Part of an error's message -> reason in the table of docs/vocabulary.md."""

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
ROW_0 = ("granite_speech", "granite_speech_plus", "kimi_k25", "muse_glimmer", "muse_spark")
"""Types that look up row 0 in place of placeholders, and then replace it by image or sound, which texts lack."""

TOKENS = 16
"""Tokens of a text."""


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
        left_out: What was not compared, and why.
        seconds: Processor time.
    """

    kind: str
    model_type: str
    edit: str
    live: str = "equal"
    folder: str = "equal"
    reasons: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def wrong(self, side: str, what: str) -> None:
        """Note a difference of one side, `"live"` or `"folder"`."""
        setattr(self, side, "wrong")
        self.reasons.setdefault(side, []).append(what)

    def refused(self, side: str, error: Exception) -> None:
        """Note that one side refuses the edit."""
        setattr(self, side, "refused")
        self.reasons.setdefault(side, []).append(first_line(error))


def first_line(error: Exception) -> str:
    """Return the class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
        return el.vocab.edit_vocabulary(target, order=sources, **options)
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
        for name in ("logits", "prediction_logits", "pooler_output", "last_hidden_state"):
            if output.get(name) is not None:
                found = output[name].detach().clone()
                return found.view(-1, found.shape[-1])
        return "no logits and no hidden states"
    except Exception as error:  # noqa: BLE001 (what a model of transformers cannot compute is left out)
        return first_line(error)


def generated(model: nn.Module, ids: Tensor) -> Tensor | str:
    """Return greedily generated IDs, or the error of the model."""
    if not hasattr(model, "generate") or getattr(model, "generation_config", None) is None:
        return "no generation"
    torch.manual_seed(0)
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=3)
    except Exception as error:  # noqa: BLE001 (some models generate from images alone)
        return first_line(error)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the saved tensors of a model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def settings_of(model: nn.Module) -> list[Any]:
    """Return copies of all configurations of a model, and the IDs and sizes that its modules store."""
    configs = [getattr(part, key, None) for part in model.modules() for key in ("config", "generation_config")]
    stored = [
        {key: value for key, value in vars(part).items() if key.endswith(ID_ENDINGS) and isinstance(value, int | list)}
        for part in model.modules()
    ]
    return [*(config.to_dict() for config in configs if hasattr(config, "to_dict")), *stored]


def files_of(folder: Path, config_class: Any) -> dict[str, Any]:
    """Return the configurations of a saved model, as their class reads them, and its tensors."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*config.json")):
        content = json.loads(file.read_text())
        if file.name == "config.json":
            content = read_by(config_class, content)
        found[file.name] = {key: value for key, value in content.items() if key not in VERSIONS}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_tensors(file)[0]
    return found


def read_by(config_class: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration file as its class reads it; transformers writes infinity as an object."""

    def number(part: dict[str, Any]) -> Any:
        return float(part["__float__"]) if part.keys() == {"__float__"} else part

    return dict(config_class.from_dict(json.loads(json.dumps(content), object_hook=number)).to_dict())


def leave_to_class(file: Path, config_class: Any) -> None:
    """Remove every second ID and size from a configuration file that is the default of its class."""
    content = json.loads(file.read_text())
    before, number = read_by(config_class, content), 0
    parts = [content]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key in sorted(key for key in part if key.endswith(ID_ENDINGS)):
            value = part.pop(key)
            try:
                is_default = read_by(config_class, content) == before
            except Exception:  # noqa: BLE001 (a class may need the entry)
                is_default = False
            number += is_default
            if not is_default or number % 2 == 0:
                part[key] = value
    file.write_text(json.dumps(content, indent=2) + "\n")


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
    elif (
        isinstance(one, list) and isinstance(other, list) and any(isinstance(x, Mapping | list) for x in [*one, *other])
    ):
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
            case = Case(outcome, Path(name))
        except CannotBuild as error:
            outcome.live = outcome.folder = "not built"
            outcome.reasons = {"live": [str(error)]}
        else:
            case.edit_live()
            case.edit_folder()
    outcome.seconds = round(time.process_time() - start, 2)
    return outcome


@torch.no_grad()
def draw_values_by_token(model: nn.Module, size: int) -> None:
    """Draw every saved tensor with so many entries that is not drawn yet: frozen ones, buffers, and integers."""
    generator, saved = torch.Generator().manual_seed(3), model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if size in tensor.shape and name in saved and not (tensor.is_floating_point() and tensor.requires_grad):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 5)
            else:  # small, since it may be the number of an expert
                tensor.copy_(torch.randint(4, tensor.shape, generator=generator))


class Case:
    """A small model of a type, saved as it was before an edit.

    Args:
        outcome: Notes what differs.
        folder: An empty folder, in which the models are saved.
    """

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self.outcome, self.edit, self.path = outcome, outcome.edit, folder
        _, whole = build(outcome.model_type, outcome.kind)
        self.model: Any = whole.get_submodule(PARTS.get(outcome.model_type, ""))
        self.size = VOCAB
        with suppress(NotImplementedError):
            self.size = getattr(self.model.get_input_embeddings(), "num_embeddings", VOCAB)
        draw_values_by_token(self.model, self.size)
        self.ids = texts(self.size)
        if outcome.model_type in ROW_0:
            absent = torch.tensor([getattr(self.model.config, key, -1) for key in PLACEHOLDERS])
            self.ids = self.ids[~torch.isin(self.ids, absent).any(1)]
        self.prompt = self.ids[:2]
        self.name_generated_tokens()
        self.sources = sources_of(self.edit, self.model, self.size)
        new = torch.full((self.size,), -1)
        new[torch.tensor(self.sources)] = torch.arange(len(self.sources))
        self.new_ids = new
        self.logits, self.tokens = logits_of(self.model, self.ids), generated(self.model, self.prompt)
        outcome.left_out = [f"logits: {self.logits}"] * isinstance(self.logits, str)
        outcome.left_out += [f"generation: {self.tokens}"] * isinstance(self.tokens, str)
        try:
            self.model.save_pretrained(folder / "before")
        except (ValueError, RuntimeError) as error:  # what transformers cannot save is not edited in a folder
            outcome.folder, outcome.reasons["folder"] = "not built", [first_line(error)]
        else:
            leave_to_class(folder / "before" / "config.json", type(self.model.config))

    def name_generated_tokens(self) -> None:
        """Let the generation configuration suppress tokens that the model would generate, and others."""
        tokens = generated(self.model, self.prompt)
        if isinstance(tokens, Tensor):
            first, second = tokens[:, -3:].tolist()
            settings = {"suppress_tokens": first[:1], "bad_words_ids": [second[:1], [second[1], first[1]]]}
            settings |= {"sequence_bias": [[[first[1]], -3.0], [[14], 0.5], [[15, 16], 4.0]]}
            for key, value in settings.items():
                setattr(self.model.generation_config, key, value)

    def edit_live(self) -> None:
        """Edit the patched model, compare it with itself before, save it, and undo the edit."""
        outcome, model = self.outcome, self.model
        try:
            el.patch(model)
        except el.core.errors.EmbedLayerError as error:
            outcome.refused("live", error)
            return
        state, settings = state_of(model), settings_of(model)
        try:
            receipt = apply(model, self.edit, self.sources, self.size)
        except el.core.errors.EmbedLayerError as error:
            outcome.refused("live", error)
        else:
            self.compare("live", model)
            if outcome.folder != "not built":
                model.save_pretrained(self.path / "live")
            receipt.undo(model)
        for path in (*differences(state_of(model), state), *differences(settings_of(model), settings)):
            outcome.wrong("live", f"after undo or refusal: {path}")

    def edit_folder(self) -> None:
        """Edit the folder of the model, and compare it with the saved live model and itself before."""
        outcome, after = self.outcome, self.path / "after"
        if outcome.folder == "not built":
            return
        files = sorted((self.path / "before").iterdir())
        source = {file.name: file.read_bytes() for file in files}
        try:
            apply(self.path / "before", self.edit, self.sources, self.size, out=after)
        except el.core.errors.EmbedLayerError as error:
            outcome.refused("folder", error)
            return
        if (self.path / "live").exists():
            for path in differences(self.files_in("after"), self.files_in("live")):
                outcome.wrong("folder", f"not as the live model: {path}")
        elif not isinstance(self.loaded("before"), str):
            loaded = self.loaded("after")
            if isinstance(loaded, str):
                outcome.wrong("folder", f"transformers opens it no more: {loaded}")
            else:
                self.compare("folder", loaded)
        for file in files:
            if file.read_bytes() != source[file.name]:
                outcome.wrong("folder", f"the source changed: {file.name}")

    def files_in(self, name: str) -> dict[str, Any]:
        """Return the configurations and tensors of a folder."""
        return files_of(self.path / name, type(self.model.config))

    def loaded(self, name: str) -> nn.Module | str:
        """Return the model that transformers opens from a folder, or its error."""
        try:
            model: nn.Module = type(self.model).from_pretrained(self.path / name, attn_implementation="eager")
        except Exception as error:  # noqa: BLE001 (what transformers cannot open is left out)
            return first_line(error)
        return model.eval()

    def compare(self, side: str, model: nn.Module) -> None:
        """Compare logits of kept tokens and greedily generated tokens with those before the edit."""
        new, kept = self.new_ids, torch.tensor(self.sources)
        is_kept = (new[self.ids] >= 0).all(1)
        if isinstance(self.logits, Tensor):
            after = logits_of(model, new[self.ids].clamp(min=0))
            if isinstance(after, str):
                self.outcome.wrong(side, f"logits: {after}")
            else:
                if "decoder_input_ids" in inspect.signature(model.forward).parameters:
                    is_kept = is_kept & is_kept.flip(0)
                rows = is_kept.repeat_interleave(len(self.logits) // len(is_kept))
                kept = kept[kept < self.logits.shape[1]]
                one, other = after[rows], self.logits[rows]
                if self.outcome.kind in KINDS:
                    one, other = one[:, : len(kept)], other[:, kept]
                if not relative(one, other) <= LIMIT:
                    self.outcome.wrong(side, f"logits differ by {relative(one, other):.0e}")
        if isinstance(self.tokens, Tensor) and self.edit != "add" and (new[self.prompt] >= 0).all():
            after = generated(model, new[self.prompt])
            expected = new[self.tokens]
            if isinstance(after, str) or (bool((expected >= 0).all()) and not torch.equal(after, expected)):
                self.outcome.wrong(side, f"generation differs: {after}")


def reason_of(message: str) -> str:
    """Return the reason of a refusal, without names and numbers of one model."""
    return next((reason for part, reason in REASONS if part in message), message)


def page_text(outcomes: Sequence[Outcome]) -> str:
    """Return the counts of outcomes, and the reasons of refusals with their model types."""
    verdicts = ("equal", "refused", "wrong", "not built")
    counts, refused = [], dict[tuple[str, str], dict[str, set[str]]]()
    for edit in EDITS:
        for side, name in (("live", "live model"), ("folder", "folder")):
            found = Counter(getattr(outcome, side) for outcome in outcomes if outcome.edit == edit)
            counts.append({"edit": edit, "of": name, **{verdict: str(found[verdict]) for verdict in verdicts}})
    for outcome in outcomes:
        for side in ("live", "folder"):
            if getattr(outcome, side) == "refused":
                types = refused.setdefault((reason_of(outcome.reasons[side][0]), side), {})
                types.setdefault(f"`{outcome.model_type}`", set()).add(outcome.edit)
    rows = [
        {
            "refused": side,
            "because": reason,
            "edits": ", ".join(edit for edit in EDITS if any(edit in edits for edits in types.values())),
            "model types": ", ".join(sorted(types)),
        }
        for (reason, side), types in sorted(refused.items(), key=lambda each: (each[0][1] == "folder", each[0][0]))
    ]
    return f"{markdown_table(counts)}\n{markdown_table(rows)}"


def _child(work: Sequence[tuple[str, str, str]], queue: Any) -> None:
    """Examine types in a process of its own, and send their outcomes."""
    torch.set_num_threads(1)
    for model_type, kind, edit in work:
        try:
            outcome = examine(model_type, kind, edit)
        except Exception:  # noqa: BLE001 (an error that is not ours is a result)
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
    parser.add_argument("--kind", choices=[*KINDS, *MORE_KINDS])
    parser.add_argument("--edit", choices=EDITS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=argparse.FileType("w"), help="write the outcomes as JSON lines")
    parser.add_argument("--read", type=Path, help="take the outcomes from such a file")
    parser.add_argument("--write", type=Path, help="write the tables into this page")
    arguments = parser.parse_args(argv)
    work = [
        (model_type, kind, edit)
        for kind in ([arguments.kind] if arguments.kind else (*KINDS, *MORE_KINDS))
        for model_type in model_types(kind)
        for edit in ([arguments.edit] if arguments.edit else EDITS)
        if not arguments.model_types or model_type in arguments.model_types
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    if arguments.read:
        read = [Outcome(**json.loads(line)) for line in arguments.read.read_text().splitlines()]
        outcomes, work = {(each.kind, each.model_type, each.edit): each for each in read}, []
    for outcome in run(work, arguments.jobs) if work else ():
        outcomes[outcome.kind, outcome.model_type, outcome.edit] = outcome
        counts[outcome.edit, outcome.live, outcome.folder] += 1
        if arguments.json:
            print(json.dumps(asdict(outcome)), file=arguments.json, flush=True)
        else:
            print(outcome, flush=True)
    if arguments.write:
        write_between_markers(arguments.write, "edited-families", page_text([*outcomes.values()]))
    for key, count in sorted(counts.items()):
        print(*key, count, file=sys.stderr)


if __name__ == "__main__":
    main()
