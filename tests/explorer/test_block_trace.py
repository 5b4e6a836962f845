"""The first block, opened: its last vectors are the model's, and its weights those of its attention."""

import itertools
import json
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from commands import run
from decoders import small
from kinds import INJECTIONS, POSITIONS

from embedlayer import TokenEmbedding, TransformerEmbedding, train_tokenizer
from embedlayer.explorer import pipeline_steps
from embedlayer.explorer.block_trace import block_formulas, trace_first_block
from embedlayer.explorer.export import write_page
from embedlayer.explorer.pipeline import choices, pipeline
from embedlayer.explorer.tiny_layer import TEXTS, WORDS, TinyPosition, tiny_layer
from embedlayer.opening import OpenedModel

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])  # more than a head is wide
PLACES = torch.arange(len(IDS))
OPTIONS = {"plain": {}, "grouped": {"num_kv_heads": 2}, "scaled": {"query_scale": 0.5, "mlp_dim": 10, "norm_eps": 0.1}}


def traced(model):
    return trace_first_block(model, IDS if len(model.injections) else None, model.table(IDS).detach(), PLACES)


@torch.no_grad()
def states_of(model):
    ids = IDS if len(model.injections) else None
    return list(model.hidden_states(ids, inputs_embeds=model.table(IDS), positions=PLACES))


def sums_of_values(trace):
    values = trace.values.repeat_interleave(len(trace.weights) // len(trace.values), 0)
    return trace.weights @ values


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_last_vectors_are_the_models_output_of_its_first_block(name, options):
    model = small(name, **OPTIONS[options])
    trace, states = traced(model), states_of(model)
    assert trace.vectors["input"].equal(states[0])
    assert trace.vectors["mlp_sum"].equal(states[1])
    assert all(mine.equal(its) for mine, its in zip(trace.states, states, strict=True))


@pytest.mark.parametrize("name", INJECTIONS)
def test_vectors_of_other_tables_have_their_place(name):
    model = small(injections=[INJECTIONS[name]()])
    trace, states = traced(model), states_of(model)
    assert list(trace.vectors.values())[-1].equal(states[1])
    assert ("stream" in trace.vectors) == (name in ("n-gram, gated", "per-layer"))
    torch.testing.assert_close(sums_of_values(trace), trace.heads)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_vector_follows_from_those_before_it(name, options):
    model = small(name, **OPTIONS[options])
    block, trace = model.blocks[0], traced(model)
    vectors = trace.vectors
    with torch.no_grad():
        expected = {
            "attention_norm": F.rms_norm(
                vectors["input"], (24,), block.attention_norm.weight, block.attention_norm.eps
            ),
            "attention": sums_of_values(trace).transpose(0, 1).flatten(1) @ block.attention.out.weight.T,
            "attention_sum": vectors["input"] + vectors["attention"],
            "mlp_norm": F.rms_norm(vectors["attention_sum"], (24,), block.mlp_norm.weight, block.mlp_norm.eps),
            "gate": vectors["mlp_norm"] @ block.mlp.gate.weight.T,
            "up": vectors["mlp_norm"] @ block.mlp.up.weight.T,
            "product": vectors["gate"] * vectors["gate"].sigmoid() * vectors["up"],
            "mlp": vectors["product"] @ block.mlp.down.weight.T,
            "mlp_sum": vectors["attention_sum"] + vectors["mlp"],
        }
    assert list(vectors) == ["input", *expected]
    for step, numbers in expected.items():
        torch.testing.assert_close(vectors[step], numbers, msg=lambda text, step=step: f"{step}: {text}")
    torch.testing.assert_close(trace.weights.sum(-1), torch.ones(4, len(IDS)))
    assert trace.weights.triu(1).count_nonzero() == 0


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_weights_are_the_softmax_of_the_scores_up_to_the_query(name, options):
    trace = traced(small(name, **OPTIONS[options]))
    later = torch.ones(len(IDS), len(IDS)).triu(1).bool()
    torch.testing.assert_close(trace.weights, trace.scores.masked_fill(later, -torch.inf).softmax(-1))


def test_the_model_has_no_hooks_and_the_same_modules_afterwards():
    model = small()
    modules = list(model.modules())
    traced(model)
    assert list(model.modules()) == modules
    assert not any(module._forward_hooks for module in modules)


# The step of the pipeline


def block_of(model, vocabulary, text):
    return pipeline(model, vocabulary, text).step("block")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", get_args(TinyPosition))
def test_a_pocket_calculator_gets_from_each_number_of_the_tiny_layer_to_the_next(position, tied):
    """From four digits of each number, and the two digits of each weight, the next number is right to 0.001."""
    step = block_of(tiny_layer(position, tied=tied), WORDS, TEXTS[0])
    of = {name: rows.double().mul(1e4).round().div(1e4) for name, rows in step.values.items()}
    sums = (of["weights"] @ of["values"]).transpose(0, 1).flatten(1)
    eps = step.facts["eps"]
    later = torch.ones(of["scores"].shape[1:]).triu(1).bool()
    weights = of["scores"].masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(of["weights"], weights, rtol=0, atol=1e-4)
    expected = {
        "attention_norm": of["input"] / (of["input"].square().mean(-1, keepdim=True) + eps).sqrt(),
        "attention": sums @ of["out_matrix"].T,
        "attention_sum": of["input"] + of["attention"],
        "mlp_norm": of["attention_sum"] / (of["attention_sum"].square().mean(-1, keepdim=True) + eps).sqrt(),
        "gate": of["mlp_norm"] @ of["gate_matrix"].T,
        "up": of["mlp_norm"] @ of["up_matrix"].T,
        "product": of["gate"] / (1 + (-of["gate"]).exp()) * of["up"],
        "mlp": of["product"] @ of["down_matrix"].T,
        "mlp_sum": of["attention_sum"] + of["mlp"],
    }
    assert [vector["name"] for vector in step.facts["vectors"]] == ["input", *expected]
    for name, numbers in expected.items():
        torch.testing.assert_close(of[name], numbers, rtol=0, atol=1e-3)
        assert [each["size"] for each in step.facts["vectors"] if each["name"] == name] == [numbers.shape[-1]]
    assert all(weight.equal(weight.mul(100).round() / 100) for name, weight in of.items() if name.endswith("_matrix"))
    assert (of["norm_weights"] == 1).all()
    assert step.vectors.equal(step.values["mlp_sum"])
    torch.testing.assert_close(step.values["lengths"][:, -1], step.values["mlp_sum"].norm(dim=-1))
    torch.testing.assert_close(step.values["state_lengths"][:, 1], step.values["mlp_sum"].norm(dim=-1))


def test_of_many_units_the_strongest_are_shown(monkeypatch):
    monkeypatch.setattr(pipeline_steps, "BINS", 5)
    model = small(num_kv_heads=2, mlp_dim=13)
    step, trace = block_of(model, None, "#3 #1 #4 #1 #5 #9 #2"), traced(model)
    assert step.facts["units_a_column"] == 3
    for t, unit in itertools.product(range(len(IDS)), range(5)):
        units = trace.vectors["product"][t, 3 * unit : 3 * unit + 3]
        index = 3 * unit + int(units.abs().argmax())
        assert [step.values[name][t, unit] for name in ("gate", "up", "product")] == pytest.approx(
            [float(trace.vectors[name][t, index]) for name in ("gate", "up", "product")], abs=1e-6
        )
    assert step.values["lengths"][:, 7].numpy() == pytest.approx(
        trace.vectors["product"].norm(dim=-1).numpy(), abs=1e-5
    )
    torch.testing.assert_close(step.values["weights"] @ step.values["values"], step.values["heads"])
    assert not any(name.endswith("_matrix") for name in step.values)


def test_the_formulas_are_those_of_the_model():
    def attention_of(model):
        return block_formulas(model, traced(model))["attention"][1]

    assert attention_of(small("learned")) == "concat(p · v) · W_outᵀ, p = softmax(q · k / √K)"
    assert attention_of(small("rotary")) == "concat(p · v) · W_outᵀ, p = softmax(rotated q · rotated k / √K)"
    assert (
        attention_of(small("alibi", query_scale=0.5)) == "concat(p · v) · W_outᵀ, p = softmax(0.5 · q · k / √K + bias)"
    )
    tables = small("none", injections=[INJECTIONS[name]() for name in ("value", "per-layer", "added")])
    assert attention_of(tables) == "concat(p · (v + ValueEmbedding)) · W_outᵀ, p = softmax(q · k / √K)"
    formulas = block_formulas(tables, traced(tables))
    assert formulas["stream"] == ("y′", "y + PerLayerEmbedding")
    assert formulas["mlp_norm"] == ("n′", "RMSNorm(x′) = w · x′ / √(mean(x′²) + 1e-05)")


def test_models_without_blocks_have_no_such_step():
    for model in (small(num_layers=0), TokenEmbedding(50, 8), TransformerEmbedding(50, 8, 16)):
        assert block_of(model, None, "#3 #1") is None


def test_embed_prints_the_block_and_its_json_has_it(tmp_path, capsys, unchecked):
    model, tokenizer = small(num_layers=3), train_tokenizer("I love dogs and dogs love me . " * 3, kind="word")
    model.save_pretrained(tmp_path / "model", tokenizer=tokenizer)
    assert run("embed", tmp_path / "model", "I love dogs", "--json") == 0
    block = json.loads(capsys.readouterr().out)["block"]
    ids = torch.tensor(tokenizer.encode("I love dogs").ids)
    states = torch.stack(list(model.hidden_states(ids)))
    torch.testing.assert_close(torch.tensor(block["mlp_sum"]), states[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(block["state_lengths"]), states.norm(dim=-1).T)
    assert run("embed", tmp_path / "model", "I love dogs") == 0
    text = capsys.readouterr().out
    assert f"s  {block['lengths'][-1][7]:9.4f}  silu(g) · u, silu(g) = g / (1 + e^(−g))" in text
    assert "  ".join(f"{length:.4f}" for length in block["state_lengths"][-1]) in text


# The view


def numbers_of(place):
    return [float(text.replace("−", "-")) for text in place.locator(".vec > span").all_inner_texts()]


@pytest.mark.browser
def test_the_page_shows_the_numbers_of_the_block_and_of_each_head(serve, open_page):
    model = tiny_layer("rotary", tied=True)
    step = block_of(model, WORDS, TEXTS[0])
    page = open_page(
        serve(OpenedModel("any", TokenEmbedding(3, 2))) + "#pipeline?layer=tiny&step=block&position=rotary"
    )
    for token in (1, 5):
        page.locator(".pipe-chips button").nth(token).click()
        for i, vector in enumerate(step.facts["vectors"]):
            line = page.locator(f'.block-line[data-vector="{vector["name"]}"]')
            assert numbers_of(line) == pytest.approx(step.values[vector["name"]][token].tolist(), abs=6e-5)
            length, size = line.locator(".block-number").all_inner_texts()
            assert float(length) == pytest.approx(float(step.values["lengths"][token, i]), abs=6e-5)
            assert int(size) == vector["size"]
            assert line.locator(".block-formula").inner_text().startswith(vector["formula"])
    root = float(step.values["input"][5, 0] / step.values["attention_norm"][5, 0])
    shown = page.locator('[data-vector="attention_norm"] small').inner_text()
    assert float(shown.split()[-1]) == pytest.approx(root, abs=6e-5)
    for head in (0, 1):
        page.get_by_label("Head of the first block").select_option(str(head))
        rows = page.locator(f'.block-values[data-head="{head}"] > li')
        assert rows.count() == 7, "six keys and the sum"
        for name, expected in (("score", step.values["scores"]), ("weight", step.values["weights"])):
            shown = rows.locator(f".block-{name}").all_inner_texts()
            numbers = [float(text.replace("−", "-")) for text in shown if text]
            assert numbers[:6] == pytest.approx(expected[head, 5, :6].tolist(), abs=6e-5)
        assert numbers[6:] == [1]
        assert numbers_of(rows.nth(2)) == pytest.approx(step.values["values"][head, 2].tolist(), abs=6e-5)
        assert numbers_of(rows.last) == pytest.approx(step.values["heads"][head, 5].tolist(), abs=6e-5)
    page.get_by_text("The matrices of this block").click()
    tables = page.locator(".block-tables table")
    assert tables.count() == 7
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    gate = [float(text.replace("−", "-")) for text in tables.nth(4).locator("td").all_inner_texts() if text]
    assert gate == pytest.approx(model.blocks[0].mlp.gate.weight.flatten().tolist())


@pytest.mark.long
@pytest.mark.browser
def test_an_exported_page_has_the_block_of_a_model_and_the_lengths_after_each(tmp_path, open_page):
    model, tokenizer = small(num_layers=3), train_tokenizer("I love dogs and dogs love me . " * 3, kind="word")
    source = OpenedModel("words", model.table, tokenizer=tokenizer, model=model)
    write_page(tmp_path / "page.html", [source])
    page = open_page((tmp_path / "page.html").as_uri() + "#pipeline?step=block")
    page.locator(".block-lengths li").nth(3).wait_for()
    step = block_of(model, tokenizer, choices(source, {})["texts"][0])
    lengths = [float(text) for text in page.locator(".block-lengths b").all_inner_texts()]
    assert lengths == pytest.approx(step.values["state_lengths"][1].tolist(), abs=6e-5)
    page.get_by_text("Blocks 2 to 3 do the same").wait_for()
    assert page.locator(".block-line canvas").count() == 10


@pytest.mark.browser
def test_special_words_of_a_step_have_definitions(serve, open_page):
    page = open_page(serve(OpenedModel("any", TokenEmbedding(3, 2))) + "#pipeline?layer=tiny&step=block")
    box = page.locator("#learn-definition")
    for word, meaning in (("RMSNorm", "√(mean(x²) + ε)"), ("SwiGLU", "silu(g) = g / (1 + e^(−g))")):
        page.locator(".pipe-head .learn-term", has_text=word).click()
        assert meaning in box.inner_text()
    page.get_by_label("Next step").click()
    box.wait_for(state="hidden")
