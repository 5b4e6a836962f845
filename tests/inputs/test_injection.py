"""The points where the vectors of additional tables enter a decoder."""

from collections.abc import Sequence

import pytest
import torch
from covering import looped
from decoders import small
from kinds import ngrams

from embedlayer import LookupTable, SizeError, TokenEmbedding
from embedlayer.inputs import (
    AddedEmbedding,
    EmbeddingInjection,
    GatedEmbedding,
    InjectionContext,
    PerLayerEmbedding,
    PerLayerInputs,
    ValueEmbedding,
)

IDS = torch.randint(1, 50, (2, 10))


def test_an_added_embedding_is_the_token_table_plus_another() -> None:
    extra = TokenEmbedding(50, 24)
    added, plain = small(injections=[AddedEmbedding(extra)]), small()
    plain.load_state_dict(added.state_dict(), strict=False)
    vectors = plain.table(IDS) + extra(IDS)
    torch.testing.assert_close(added(IDS), plain(inputs_embeds=vectors))


def test_dropout_is_applied_to_what_is_added_at_the_input() -> None:
    model = small(injections=[AddedEmbedding(TokenEmbedding(50, 24, init_std=1.0))], dropout=0.5).train()
    assert 0.3 < float((next(model.hidden_states(IDS)) == 0).float().mean()) < 0.7


class Everywhere(EmbeddingInjection):
    """Counts the calls of each hook and checks what they are called with."""

    def __init__(self, table: LookupTable) -> None:
        super().__init__()
        self.table = table
        self.calls: list[str] = []

    def look_up(self, x: torch.Tensor, context: InjectionContext) -> torch.Tensor:
        self.calls.append("look_up")
        return self.table(context.ids)

    def add_to_input(self, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        self.calls.append("input")
        return x

    def add_to_stream(
        self, x: torch.Tensor, vectors: torch.Tensor, depth: int, context: InjectionContext
    ) -> torch.Tensor:
        self.calls.append(f"stream {depth}")
        return x

    def add_to_values(self, values: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor, block: int) -> torch.Tensor:
        self.calls.append(f"values {block}")
        assert values.shape == (2, 4, 10, 6)
        return values


def test_a_decoder_calls_each_hook_at_its_point_and_looks_up_once() -> None:
    injection = Everywhere(TokenEmbedding(50, 3))
    model = small(injections=[injection])
    model(IDS)
    assert injection.calls == ["look_up", "input", "stream 0", "values 0", "stream 1", "values 1", "stream 2"]
    assert injection.config["table"]["kind"] == "token_embedding"


def value(heads: int = 4, width: int = 24, blocks: Sequence[int] = (1,), channels: int = 8) -> ValueEmbedding:
    return ValueEmbedding(TokenEmbedding(50, width), heads, blocks=blocks, gate_channels=channels)


@looped(
    "build",
    [
        lambda: AddedEmbedding(TokenEmbedding(50, 12)),
        lambda: GatedEmbedding(ngrams(), 24, block=2),
        lambda: GatedEmbedding(ngrams(), 24, block=1, kernel_size=-1),
        lambda: PerLayerEmbedding(TokenEmbedding(50, 18), 24, num_layers=3),
        lambda: PerLayerEmbedding(TokenEmbedding(50, 12), 24),
        lambda: PerLayerEmbedding(PerLayerInputs(TokenEmbedding(50, 12), 24, 2), num_layers=3),
        lambda: PerLayerInputs(TokenEmbedding(50, 12), 24, 5),
        *(lambda options=options: value(**options) for options in ({"width": 12}, {"heads": 2}, {"heads": 5})),
        *(lambda channels=channels: value(channels=channels) for channels in (0, 32)),
        *(lambda blocks=blocks: value(blocks=blocks) for blocks in ([2], [], [1, 1], [-1, 1])),
    ],
)
def test_sizes_that_do_not_fit_the_decoder_are_refused(build) -> None:
    with pytest.raises(SizeError):
        small(injections=[build()])
