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


def check_arithmetic(steps):
    """From four digits of each number, and the two digits of each weight, the next number is right to 0.001."""
    block = steps["block"]
    of = {name: rows.double().mul(1e4).round().div(1e4) for name, rows in block["values"].items()}
    later = torch.ones(of["scores"].shape[1:]).triu(1).bool()
    weights = of["scores"].masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(of["weights"], weights, rtol=0, atol=1e-4)

    def normed(rows):
        return rows / (rows.square().mean(-1, keepdim=True) + block["facts"]["eps"]).sqrt()

    expected = {
        "attention_norm": normed(of["input"]),
        "attention": (of["weights"] @ of["values"]).transpose(0, 1).flatten(1) @ of["out_matrix"].T,
        "attention_sum": of["input"] + of["attention"],
        "mlp_norm": normed(of["attention_sum"]),
        "gate": of["mlp_norm"] @ of["gate_matrix"].T,
        "up": of["mlp_norm"] @ of["up_matrix"].T,
        "product": of["gate"] / (1 + (-of["gate"]).exp()) * of["up"],
        "mlp": of["product"] @ of["down_matrix"].T,
        "mlp_sum": of["attention_sum"] + of["mlp"],
    }
    assert [vector["name"] for vector in block["facts"]["vectors"]] == ["input", *expected]
    for vector, name in zip(block["facts"]["vectors"][1:], expected, strict=True):
        torch.testing.assert_close(of[name], expected[name], rtol=0, atol=1e-3)
        assert vector["size"] == of[name].shape[-1]
    assert all(rows.mul(100).round().div(100).equal(rows) for name, rows in of.items() if name.endswith("_matrix"))
    head = {name: rows.double() for name, rows in steps["head"]["values"].items()}
    torch.testing.assert_close(head["hidden"], head["norm_weight"] * normed(head["before_norm"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(head["logits"], head["hidden"][-1:] @ head["head_rows"].T, rtol=0, atol=1e-5)


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
        check_arithmetic(steps)
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


def test_all_choices_have_one_table_of_two_digits(tiny):
    tables = [steps_of(tiny(position, tied=tied))["look_up"]["values"]["near"][0]
              for position, tied in itertools.product(SCHEMES, (True, False))]  # fmt: skip
    assert all(table.equal(tables[0]) for table in tables)
    assert (tables[0] != 0).all()
    torch.testing.assert_close(tables[0] * 100, (tables[0] * 100).round())


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
