"""The layer whose numbers can all be read: a model that is built of them computes the same, and so does a reader."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from explorer_requests import Refused, ids_of, steps_of

from embedlayer import DecoderLM, OutputHead, TokenEmbedding

SCHEMES = ("learned", "sinusoidal", "rotary", "alibi")


def built_of(steps, position, tied):
    """A decoder of the numbers that the page shows."""
    block, head = steps["block"]["values"], steps["head"]["values"]
    table = TokenEmbedding.from_pretrained(steps["look_up"]["values"]["near"][0], scale="sqrt_dim", freeze=False)
    own = None if tied else OutputHead(vocab_size=10, embed_dim=4)
    sizes = {"num_layers": 1, "num_heads": 2, "head_dim": 4, "mlp_dim": 8, "max_seq_len": 16}
    model = DecoderLM(table, position, own, **sizes)
    parts = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
    state = {f"blocks.0.{of}.{name}.weight": block[f"{name}_matrix"] for of in parts for name in parts[of]}
    state |= dict(
        zip(("blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"), block["norm_weights"], strict=True)
    )
    state |= {"norm.weight": head["norm_weight"][0]} | ({} if tied else {"head.weight": head["head_rows"]})
    if position == "learned":
        rows = steps["position"]["values"]["positions"]
        state["position.weight"] = F.pad(rows, (0, 0, 0, 16 - len(rows)))
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert [name for name in missing if "table" not in name] == []
    return model


@pytest.mark.parametrize("position", SCHEMES)
def test_a_model_of_the_numbers_shown_computes_the_numbers_shown(tiny, position):
    for tied in (True, False):
        answer = tiny(position, tied=tied)
        steps, ids = steps_of(answer), ids_of(answer)
        model = built_of(steps, position, tied)
        close = lambda found, expected: torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # noqa: E731
        torch.testing.assert_close(steps["dropout"]["values"]["kept"], next(iter(model.hidden_states(ids))))
        logits = model(ids)
        close(steps["head"]["values"]["logits"], logits[-1:])
        F.cross_entropy(logits[:-1], ids[1:]).backward()
        gradient = steps["gradient"]
        rows, head = gradient["values"]["rows_gradient"], gradient["values"]["head_gradient"]
        close(model.table.weight.grad, rows + head if tied else rows)
        if not tied:
            close(model.head.weight.grad, head)
        assert rows.norm(dim=1).nonzero()[:, 0].tolist() == ids[:-1].unique().tolist()
        assert (gradient["facts"]["touched_by_look_up"], gradient["facts"]["touched_by_head"]) == (
            len(ids[:-1].unique()),
            10,
        )
        close(gradient["values"]["through_rows"][0], rows.norm(dim=1))
        close(gradient["values"]["through_head"][0], head.norm(dim=1))


def test_all_choices_have_one_table_and_all_weights_two_digits(tiny):
    """So that a pocket calculator gets from each number to the next."""
    tables = []
    for position, tied in itertools.product(SCHEMES, (True, False)):
        steps = steps_of(tiny(position, tied=tied))
        block, head = steps["block"]["values"], steps["head"]["values"]
        weights = [rows for name, rows in block.items() if name.endswith("_matrix")]
        weights += [head["head_rows"], steps["look_up"]["values"]["near"][0]]
        for rows in weights:
            torch.testing.assert_close(rows * 100, (rows * 100).round())
        assert (len(weights), (block["norm_weights"] == 1).all()) == (9, True)
        tables.append(weights[-1])
    assert all(table.equal(tables[0]) for table in tables)
    assert (tables[0] != 0).all()


def test_its_words_are_those_of_its_texts_and_all_others_become_the_unknown_token(tiny, tiny_choices):
    assert tiny_choices["positions"] == [*SCHEMES]
    read = {text: tiny(text=text) for text in tiny_choices["texts"]}
    for text, answer in read.items():
        known = [word if word in tiny_choices["words"] else "<unk>" for word in text.split()]
        assert [token["text"] for token in answer["tokens"]] == known
        assert answer["how"].endswith("“me”.") == ("me" in text)
    assert {token["id"] for answer in read.values() for token in answer["tokens"]} == set(range(10))
    with pytest.raises(Refused, match="learned, sinusoidal, rotary, alibi"):
        tiny("relative")
