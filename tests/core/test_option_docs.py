"""`help` of a function lists its keyword options, which are documented once, at the class that declares them."""

import inspect
from typing import get_args, get_type_hints

import pytest

import embedlayer as el
from embedlayer import vocab
from embedlayer.heads.draft import DraftHead
from embedlayer.losses import LinearLogits, LogitOptions, LossOptions, ScoreOptions, token_statistics
from embedlayer.models.generation import GenerationOptions
from embedlayer.models.sampling import SamplingOptions, sample
from embedlayer.vocab import EditOptions

EDITS = ("edit_vocabulary", "add_tokens", "remove_tokens", "trim_vocabulary", "transplant")
WITH_A_LOSS = (el.OutputHead, DraftHead, el.DecoderLM)
SHOWN = {
    EditOptions: [getattr(vocab, name) for name in EDITS],
    SamplingOptions: [sample],
    GenerationOptions: [el.generate],
    LogitOptions: [el.TokenEmbedding.logits, el.OutputHead.uncomputed_logits, LinearLogits],
    ScoreOptions: [el.token_log_probs, token_statistics, el.OutputHead.token_log_probs, el.OutputHead.token_statistics],
    LossOptions: [el.linear_cross_entropy, el.OutputHead.multi_token_loss, *(each.loss for each in WITH_A_LOSS)],
}

INHERITED = {
    GenerationOptions: [SamplingOptions],
    ScoreOptions: [LogitOptions],
    LossOptions: [LogitOptions, ScoreOptions],
}


@pytest.mark.parametrize("options", SHOWN)
def test_help_lists_every_option_once_with_its_text(options) -> None:
    for function in SHOWN[options]:
        check(options, function)


def check(options, function) -> None:
    text, kinds = inspect.getdoc(function), [*INHERITED.get(options, []), options]
    documented = "\n".join(inspect.getdoc(kind) for kind in kinds)
    for name in get_type_hints(options):
        entry = next(line.strip() for line in documented.splitlines() if line.strip().startswith(f"{name}: "))
        assert text.count(f"\n    {entry}") == 1
    assert text.index("    **") < text.index(f"\n    {next(iter(get_type_hints(options)))}: ")
    *_, parameter = inspect.signature(function).parameters.values()
    assert get_args(parameter.annotation) == (options,)
