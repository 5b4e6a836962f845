"""`embedlayer generate`: continue a text with a decoder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import SOURCE, chosen_device, json_option, tokenizer_option
from embedlayer.cli.printing import print_json

if TYPE_CHECKING:
    from embedlayer.models.generation import LogprobsMode

TOKENS = 256
TEMPERATURE, TOP_P = 0.8, 0.95
SEEDS = 1_000_000  # a seed that the command chooses is below this, so that it is short enough to type


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("text", default="")
@click.option("--tokens", type=int, help=f"Maximum number of new tokens.  [default: {TOKENS}, or up to max_seq_len]")
@click.option(
    "--temperature", type=float, help=f"Sampling temperature; higher is more random.  [default: {TEMPERATURE}]"
)
@click.option("--top-k", type=int, help="Sample from the K most likely tokens.  [default: all]")
@click.option(
    "--top-p", type=float, help=f"Sample from the most likely tokens with this total probability.  [default: {TOP_P}]"
)
@click.option(
    "--min-p",
    type=float,
    help="Sample from the tokens of at least this fraction of the largest probability.  [default: all]",
)
@click.option(
    "--repetition-penalty",
    type=float,
    help="Divide positive logits of tokens in the text by this number, multiply negative ones.  [default: 1]",
)
@click.option("--greedy", is_flag=True, help="Take the most likely token each time instead of sampling.")
@click.option(
    "--seed", type=int, help="Seed of sampling; the same seed repeats a text.  [default: a new one each time]"
)
@click.option(
    "--log-probs",
    type=click.Choice(["raw_logprobs", "processed_logprobs"]),
    help="With --json, add the log-probability of each new token: of the model, or of the distribution sampled from.",
)
@tokenizer_option
@click.option("--device", default="auto", help="Device to run on: cpu, cuda, ...")
@json_option
def generate(
    source: Path,
    text: str,
    tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    greedy: bool,
    seed: int | None,
    log_probs: "LogprobsMode | None",
    tokenizer_from: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Continue TEXT with a decoder.

    SOURCE is a run, a saved decoder, or a LLaMA-type checkpoint (a folder or a file). The text goes to standard output.
    A last sentence on standard error says how the text was sampled.
    """
    import torch

    from embedlayer.models.generation import next_tokens
    from embedlayer.models.sampling import SamplingOptions
    from embedlayer.opening.readers import open_model
    from embedlayer.tokenization.tokenizer_calls import decode

    if greedy and (temperature, top_k, top_p, min_p, seed) != (None,) * 5:
        raise click.UsageError(
            "--greedy samples nothing: leave --temperature, --top-k, --top-p, --min-p and --seed out."
        )
    if log_probs is not None and not as_json:
        raise click.UsageError("--log-probs adds numbers to the result of --json: pass --json too.")
    temperature = 0.0 if greedy else TEMPERATURE if temperature is None else temperature
    top_p = TOP_P if top_p is None else top_p
    seed = torch.Generator().seed() % SEEDS if seed is None else seed
    opened = open_model(source, tokenizer_from, device=chosen_device(device))
    model, tokenizer = opened.require_decoder(), opened.require_tokenizer()
    ids, stops = opened.prompt(text), tuple(token for tokens in opened.text_limits for token in tokens)
    reach = model.position.max_seq_len
    if tokens is None:
        tokens = TOKENS if reach is None else max(0, min(TOKENS, reach + 1 - len(ids)))
    penalty: SamplingOptions = {"repetition_penalty": repetition_penalty}
    sampling: SamplingOptions = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, **penalty}
    torch.manual_seed(seed)
    prompt = torch.tensor([ids], device=next(model.parameters()).device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "stop_id": stops, **sampling}
    numbers: list[float] = []
    if log_probs is not None:
        options |= {"return_log_probs": True, "logprobs_mode": log_probs}
    new: list[int] = []
    shown = ""
    for token in next_tokens(model, prompt, **options):
        if log_probs is not None:
            numbers.append(float(token.log_probs))
        new.append(int(token if log_probs is None else token.ids))
        if as_json:
            continue
        text = decode(tokenizer, [*ids, *new]).rstrip("\ufffd")
        if text.startswith(shown):
            click.echo(text[len(shown) :], nl=False)
            shown = text
    whole = decode(tokenizer, [*ids, *new])
    stopped = bool(new) and new[-1] in stops
    if as_json:
        result = {"text": whole, "ids": ids + new, "new_tokens": len(new), "stopped": stopped}
        result |= {} if log_probs is None else {"logprobs_mode": log_probs, "log_probs": numbers}
        chosen = {**sampling, "seed": seed} if temperature else penalty
        print_json({**result, "greedy": not temperature, **chosen})
        return
    if not whole.startswith(shown):  # the decoder changed text that is on the screen: print all of it again
        click.echo()
        shown = ""
    click.echo(whole[len(shown) :])
    end = ", where the model ended the text" if stopped else ""
    named = ", ".join(
        f"{name.replace('_', '-')} {value:g}"
        for name, value in (sampling if temperature else penalty).items()
        if value is not None
    )
    if temperature:
        how = f"sampled at {named}; --seed {seed} gives the same text again"
    else:
        how = ", ".join(filter(None, ("the most likely token each time (--greedy)", named)))
    click.echo(f"\n{source} added {len(new):,} tokens to the {len(ids):,} of the prompt{end}: {how}.", err=True)
