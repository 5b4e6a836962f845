"""`embedlayer generate`: what a model says next."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from embedlayer.cli.paths import MODEL, TOKENIZER
from embedlayer.short_repr import short_repr

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.models.decoder import DecoderLM

TOKENS = 256
TEMPERATURE, TOP_P = 0.8, 0.95
SEEDS = 1_000_000
"""Seeds that are chosen for the user are below this: short enough to type."""

GENERATION = "generation_config.json"


class Opened(NamedTuple):
    """A model to decode with."""

    model: "DecoderLM"
    tokenizer: "Tokenizer"
    starts_with: tuple[int, ...]
    """What stands in front of a text where the tokenizer adds nothing."""
    stops: tuple[int, ...]
    """Tokens that end a text."""
    adds_specials: bool
    """Whether the tokenizer's own special tokens belong to a text, as they do for models made by others."""

    def __repr__(self) -> str:
        return short_repr(self)


@click.command()
@click.argument("directory", type=MODEL)
@click.argument("text", default="")
@click.option("--tokens", type=int, help=f"Tokens to add at most.  [default: {TOKENS}, or what the positions reach]")
@click.option("--temperature", type=float, help=f"Higher is more random.  [default: {TEMPERATURE}]")
@click.option("--top-k", type=int, help="Sample from the K most likely tokens.  [default: all]")
@click.option(
    "--top-p",
    type=float,
    help=f"Sample from the most likely tokens that have this probability together.  [default: {TOP_P}]",
)
@click.option("--greedy", is_flag=True, help="Take the most likely token each time instead of sampling.")
@click.option("--seed", type=int, help="The same seed gives the same text.  [default: a new one each time]")
@click.option("--tokenizer", "tokenizer_from", type=TOKENIZER, help="Use this tokenizer instead.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def generate(
    directory: Path,
    text: str,
    tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    seed: int | None,
    tokenizer_from: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Continue TEXT with the model in DIRECTORY: a trained run, or a LLaMA-type checkpoint (a folder or a file).

    The text goes to standard output; a last sentence, on standard error, says how it was sampled.
    """
    import torch

    from embedlayer.cli.pipeline import chosen_device
    from embedlayer.models.generate import next_tokens

    if greedy and (temperature, top_k, top_p, seed) != (None,) * 4:
        raise click.UsageError("--greedy samples nothing: leave --temperature, --top-k, --top-p and --seed out.")
    temperature = 0.0 if greedy else TEMPERATURE if temperature is None else temperature
    top_p = TOP_P if top_p is None else top_p
    seed = torch.Generator().seed() % SEEDS if seed is None else seed
    opened = open_model(directory, tokenizer_from, chosen_device(device))
    model = opened.model
    ids = begin(opened, text)
    reach = model.position.max_seq_len
    if tokens is None:
        tokens = TOKENS if reach is None else max(0, min(TOKENS, reach + 1 - len(ids)))
    torch.manual_seed(seed)
    following = next_tokens(
        model,
        torch.tensor([ids], device=next(model.parameters()).device),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_id=opened.stops,
    )
    new: list[int] = []
    shown = ""
    for token in following:
        new.append(int(token))
        if not as_json:
            shown = _show(opened.tokenizer.decode([*ids, *new]).rstrip("\ufffd"), shown)
    said = opened.tokenizer.decode([*ids, *new])
    stopped = bool(new) and new[-1] in opened.stops
    if as_json:
        chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed} if temperature else {}
        result = {"text": said, "ids": ids + new, "new_tokens": len(new), "stopped": stopped}
        click.echo(json.dumps({**result, "greedy": not temperature, **chosen}))
        return
    if not said.startswith(shown):  # a decoder that takes back what it gave: say it all again
        click.echo()
        shown = ""
    click.echo(said[len(shown) :])
    end = ", where the model ended the text" if stopped else ""
    if temperature:
        most = "" if top_k is None else f"top-k {top_k}, "
        how = f"sampled at temperature {temperature:g}, {most}top-p {top_p:g}; --seed {seed} gives the same again"
    else:
        how = "each the most likely one (--greedy)"
    click.echo(f"\n{directory} added {len(new):,} tokens to the {len(ids):,} given{end}: {how}.", err=True)


def _show(text: str, shown: str) -> str:
    """Print what is new in `text`; returns what stands on the screen."""
    if not text.startswith(shown):
        return shown
    click.echo(text[len(shown) :], nl=False)
    return text


def begin(opened: Opened, text: str) -> list[int]:
    """The tokens that a text begins with.

    Raises:
        TextError: There are none, and the model has no token that starts a text.
    """
    from embedlayer.errors import TextError

    ids: list[int] = opened.tokenizer.encode(text, add_special_tokens=opened.adds_specials).ids
    ids = ids or list(opened.starts_with)
    if not ids:
        raise TextError("This model has no token that starts a text: give it a beginning.")
    return ids


def open_model(path: Path, tokenizer_from: Path | None = None, device: str = "cpu") -> Opened:
    """A trained run, or a LLaMA-type checkpoint, with its tokenizer.

    Raises:
        FileError: There is no model.
        CheckpointError: It is damaged, or of another kind.
        TokenizerError: The tokenizer is missing, damaged, or has more entries than the table.
    """
    from embedlayer.models.llama import load_llama
    from embedlayer.data.tokenizer import end_of_text_id, load_tokenizer, require_rows
    from embedlayer.training.run_directory import load_run

    if is_run(path):
        model, tokenizer = load_run(path, device=device)
        tokenizer = tokenizer if tokenizer_from is None else load_tokenizer(tokenizer_from)
        require_rows(tokenizer, model.table.vocab_size, tokenizer_from or path)
        if (path / GENERATION).exists():  # made of a checkpoint of others, whose special tokens it keeps
            starts, ends = _special_ids(path, tokenizer)
            return Opened(model, tokenizer, starts_with=starts[:1], stops=(*starts, *ends), adds_specials=True)
        end = end_of_text_id(tokenizer)
        ends = () if end is None else (end,)
        opened = Opened(model, tokenizer, starts_with=ends, stops=ends, adds_specials=False)
    else:
        model = load_llama(path, device=device)
        folder = path if path.is_dir() else path.parent
        tokenizer = load_tokenizer(folder if tokenizer_from is None else tokenizer_from)
        starts, ends = _special_ids(folder, tokenizer)
        opened = Opened(model, tokenizer, starts_with=starts[:1], stops=(*starts, *ends), adds_specials=True)
    require_rows(tokenizer, model.table.vocab_size, path)
    return opened


def is_run(path: Path) -> bool:
    """Whether a folder is one of ours: trained or in training, or nothing that another kind of model is read from."""
    from embedlayer.checkpoints.tables import is_ours
    from embedlayer.pretrained import CONFIG

    return is_ours(path) or not (path.is_file() or (path / CONFIG).exists() or any(path.glob("*.safetensors*")))


def _special_ids(folder: Path, tokenizer: "Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that start and that end a text: as the configuration says, else by their names."""
    from embedlayer.io.files import read_json
    from embedlayer.data.tokenizer import end_of_text_id

    stated: dict[str, Any] = {}
    for name in ("config.json", GENERATION):
        if (folder / name).exists():
            stated |= {key: value for key, value in read_json(folder / name).items() if value is not None}

    def ids(key: str, named: int | None) -> tuple[int, ...]:
        values = stated.get(key, named)
        values = values if isinstance(values, list) else [values]
        return tuple(value for value in values if isinstance(value, int))

    return ids("bos_token_id", tokenizer.token_to_id("<s>")), ids("eos_token_id", end_of_text_id(tokenizer))
