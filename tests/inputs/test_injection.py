"""The points where the vectors of additional tables enter a decoder."""

import pytest
import torch
from covering import looped
from decoders import small

from embedlayer import LookupTable, SizeError, TokenEmbedding
from embedlayer.inputs import AddedEmbedding, EmbeddingInjection, InjectionContext, ValueEmbedding

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


@looped(
    "build, message",
    [
        (lambda: AddedEmbedding(TokenEmbedding(50, 12)), "has width 12, the decoder has 24"),
        (lambda: AddedEmbedding(TokenEmbedding(50, 12), 0), "width must be at least 1, not 0"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 12), 4, blocks=[1], gate_channels=8), "4 heads of width 6"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 24), 2, blocks=[1], gate_channels=8), "2 of width 12"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 24), 4, blocks=[2], gate_channels=8), "There is no block 2"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 24), 4, blocks=[1], gate_channels=32), "gate_channels 32 exceeds"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 24), 5, blocks=[1]), "cannot be divided into 5 heads"),
        (lambda: ValueEmbedding(TokenEmbedding(50, 24), 4, blocks=[]), "at least one, not"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build, message) -> None:
    with pytest.raises(SizeError, match=message):
        small(injections=[build()])


def test_block_numbers_are_distinct_and_not_negative() -> None:
    assert tuple(ValueEmbedding(TokenEmbedding(50, 24), 4, blocks=[3, 1]).blocks) == (3, 1)
    for blocks in ([1, 1], [-1, 1]):
        with pytest.raises(SizeError, match="distinct block numbers"):
            ValueEmbedding(TokenEmbedding(50, 24), 4, blocks=blocks)
