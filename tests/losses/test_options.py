"""An option is honoured or refused: every function and method checks names and ranges first, by the same sentence."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import embedlayer as el
from embedlayer.heads import DraftHead, PredictionHead, StreamHead
from embedlayer.losses import BlockLogits, LinearLogits, LogitOptions, LossOptions, ScoreOptions
from embedlayer.losses import token_statistics as token_statistics_of

V, D = 11, 4
KINDS = (LogitOptions, ScoreOptions, LossOptions)
OUTPUTS: dict[str, Callable[[], Any]] = {
    "TokenEmbedding": lambda: el.TokenEmbedding(V, D),
    "QuantizedEmbedding": lambda: el.QuantizedEmbedding.from_table(torch.randn(V, D), 8),
    "OutputHead": lambda: el.OutputHead(D, V),
    "PredictionHead": lambda: PredictionHead(el.OutputHead(D, V), dense=torch.nn.Linear(D, D)),
    "DraftHead": lambda: DraftHead(el.OutputHead(D, V), range(5)),
    "StreamHead": lambda: StreamHead(el.OutputHead(D, V), 1),
    "ShardedTable": lambda: object.__new__(el.distributed.ShardedTable),  # not built: that takes several processes
    "DecoderLM": lambda: el.DecoderLM(el.TokenEmbedding(V, D), "none", num_layers=1, num_heads=1),
}
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "logits": lambda: (torch.randn(3, D),),
    "sharded_logits": lambda: (torch.randn(3, D),),
    "uncomputed_logits": lambda: (torch.randn(3, D),),
    "loss": lambda: (torch.randn(3, D), torch.arange(3)),
    "token_log_probs": lambda: (torch.randn(3, D), torch.arange(3)),
    "token_statistics": lambda: (torch.randn(3, D), torch.arange(3)),
    "multi_token_loss": lambda: ([torch.randn(1, 3, D)] * 2, torch.arange(3)[None]),
}
FUNCTIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "linear_cross_entropy": lambda: (el.linear_cross_entropy, torch.randn(3, D), torch.randn(V, D), torch.arange(3)),
    "token_log_probs": lambda: (el.token_log_probs, torch.randn(3, D), torch.randn(V, D), torch.arange(3)),
    "token_statistics": lambda: (token_statistics_of, torch.randn(3, D), el.OutputHead(D, V), torch.arange(3)),
    "LinearLogits": lambda: (LinearLogits, torch.randn(3, D), torch.randn(V, D)),
    "BlockLogits": lambda: (BlockLogits, torch.randn(3, D), lambda h, start, stop: h, V, V),
}


def kind_of(function: Callable[..., Any]) -> type | None:
    """Return which options a function takes, by its signature."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and set(get_args(parameter.annotation)) & set(KINDS):
            return get_args(parameter.annotation)[0]
    return None


METHODS = {
    f"{name}.{method}": (name, method)
    for name, build in OUTPUTS.items()
    for method, function in inspect.getmembers(type(build()), inspect.isfunction)
    if not method.startswith("_") and kind_of(function) is not None
}
CALLS = [*METHODS, *FUNCTIONS]


def called(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if name in FUNCTIONS:
        function, *options = FUNCTIONS[name]()
        return function, tuple(options)
    output, method = METHODS[name]
    arguments = (torch.arange(3), torch.arange(3)) if output == "DecoderLM" else ARGUMENTS[method]()
    if output == "StreamHead":  # targets are those of one stream
        arguments = (arguments[0], *(each.unsqueeze(-1) for each in arguments[1:]))
    return getattr(OUTPUTS[output](), method), arguments


WRONG: dict[str, tuple[list[Any], str]] = {
    "logit_scale": ([float("nan"), torch.ones(()), None], "a finite number"),
    "bias": ([0.5, [0.0] * V, torch.zeros(V, 1), torch.zeros(V).long()], r"a tensor of floats \(V,\) or None"),
    "softcap": ([0.0, -30.0, float("inf"), True, "30"], "a number above 0 or None"),
    "temperature": ([0.0, -1.0, float("inf"), float("nan"), None], "a number above 0"),
    "padding_idx": ([-1, 1.5, False], "a token ID or None"),
    "mask_padding": ([1, None], "True or False"),
    "ignore_index": ([1.0, None], "an integer"),
    "vocab_size": ([0, 3.0], "a number of tokens or None"),
    "impl": (["fast", None], "one of auto, plain, chunked, triton"),
    "chunk_bytes": ([0, 2.0], "a number of bytes or None"),
    "drop_ignored": ([1, "auto"], "True, False or None"),
    "label_smoothing": ([1.5, -0.2, float("nan"), None], "a number from 0 to 1"),
    "z_loss": ([-1.0, float("inf"), None], "a number of at least 0"),
    "reduction": (["average", None], "one of mean, sum, none"),
    "token_weights": ([1.0, [1.0] * 3], "a tensor of floats or None"),
    "temprature": ([2.0], ""),
    "min_chunks": ([2], ""),
}


def assert_refused_by_name(name: str) -> None:
    function, arguments = called(name)
    kind, own = kind_of(function), inspect.signature(function).parameters
    assert kind is not None
    if name not in FUNCTIONS:
        arguments = tuple(torch.zeros(0) for _ in arguments)  # any work would fail with these
    for option in WRONG.keys() - {*list(own)[: len(arguments)]}:
        values, allowed = WRONG[option]
        is_known = option in kind.__annotations__ or option in own
        message = rf"^{name}: {option} must be {allowed}, not " if is_known else rf"^{name} has no option {option}\. "
        for value in values:
            with pytest.raises(el.SizeError, match=message):
                function(*arguments, **{option: value})


def assert_ends_of_ranges_are_taken(name: str) -> None:
    function, arguments = called(name)
    own = list(inspect.signature(function).parameters)[len(arguments) :]
    takes = {*kind_of(function).__annotations__, *own}
    for options in (
        {"label_smoothing": 1.0, "z_loss": 0.0},
        {"label_smoothing": 0, "z_loss": 2, "temperature": 3, "logit_scale": -1},
        {"bias": torch.zeros(V), "padding_idx": V - 1, "mask_padding": True, "vocab_size": V},
    ):
        function(*arguments, **{option: value for option, value in options.items() if option in takes})


@pytest.mark.parametrize("owner", [*OUTPUTS, *FUNCTIONS])
def test_what_has_no_meaning_is_refused_by_name_before_any_work_and_the_ends_of_ranges_are_taken(
    owner, unchecked
) -> None:
    for name in CALLS:
        if name.partition(".")[0] == owner:
            assert_refused_by_name(name)
            if owner != "ShardedTable":
                assert_ends_of_ranges_are_taken(name)


def test_options_of_single_tokens_fit_the_vocabulary(unchecked: None) -> None:
    hidden, weight, targets = torch.randn(3, D), torch.randn(V, D), torch.arange(3)
    for impl in ("plain", "chunked"):
        with pytest.raises(el.ShapeError, match=r"bias \(1,\) must have one number for each of the 11 tokens"):
            el.linear_cross_entropy(hidden, weight, targets, bias=torch.zeros(1), impl=impl)
        with pytest.raises(el.SizeError, match="padding_idx must be one of the 11 tokens, not 11"):
            el.linear_cross_entropy(hidden, weight, targets, padding_idx=V, impl=impl)
    with pytest.raises(el.SizeError, match="vocab_size must be at most the 11 rows of weight, not 12"):
        el.linear_cross_entropy(hidden, weight, targets, vocab_size=V + 1)


def test_the_law_holds_for_every_public_function_with_these_options() -> None:
    packages = (el, el.losses, el.heads, el.tables, el.models, el.distributed)
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    functions = {name for name, value in public.items() if inspect.isfunction(value) and kind_of(value) is not None}
    assert functions <= set(FUNCTIONS)
    with_methods = {
        name
        for name, value in public.items()
        if inspect.isclass(value) and any(kind_of(each) for _, each in inspect.getmembers(value, inspect.isfunction))
    }
    tables = {name for name in with_methods if issubclass(public[name], el.TokenTable)}  # their methods are inherited
    assert with_methods - tables <= {*OUTPUTS, *FUNCTIONS}
