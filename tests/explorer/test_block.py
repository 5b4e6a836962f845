"""The first block, opened: its last vectors are the model's, and its weights those of its attention."""

import pytest
import torch
import torch.nn.functional as F
from decoders import small
from explorer_requests import steps_of
from kinds import INJECTIONS, POSITIONS

from embedlayer import TokenEmbedding, TransformerEmbedding
from embedlayer.opening import OpenedModel

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])  # more than a head is wide
OPTIONS = {"plain": {}, "grouped": {"num_kv_heads": 2}, "scaled": {"query_scale": 0.5, "mlp_dim": 10, "norm_eps": 0.1}}


@pytest.fixture
def block_of(ask):
    """The step of the block of a model, or `None`."""

    def ask_for(model):
        source = OpenedModel("model", model if isinstance(model, TokenEmbedding) else model.table, model=model)
        text = " ".join(f"#{token}" for token in IDS)
        return steps_of(ask(source, "pipeline", text=text)).get("block")

    return ask_for


def computed_by(block, values):
    """Each vector by plain torch, from those that the page shows before it."""
    sums = (values["weights"] @ values["values"]).transpose(0, 1).flatten(1)
    return {
        "attention_norm": F.rms_norm(values["input"], (24,), block.attention_norm.weight, block.attention_norm.eps),
        "attention": sums @ block.attention.out.weight.T,
        "attention_sum": values["input"] + values["attention"],
        "mlp_norm": F.rms_norm(values["attention_sum"], (24,), block.mlp_norm.weight, block.mlp_norm.eps),
        "gate": values["mlp_norm"] @ block.mlp.gate.weight.T,
        "up": values["mlp_norm"] @ block.mlp.up.weight.T,
        "product": F.silu(values["gate"]) * values["up"],
        "mlp": values["product"] @ block.mlp.down.weight.T,
        "mlp_sum": values["attention_sum"] + values["mlp"],
    }


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_each_vector_follows_from_those_before_it_and_the_last_is_the_models(block_of, options):
    later = torch.ones(len(IDS), len(IDS)).triu(1).bool()
    for name in POSITIONS:
        model = small(name, **OPTIONS[options])
        modules = [*model.modules()]
        step, states = block_of(model), [*model.hidden_states(IDS)]
        values = step["values"]
        expected = computed_by(model.blocks[0], values)
        assert [vector["name"] for vector in step["facts"]["vectors"]] == ["input", *expected]
        torch.testing.assert_close(values["mlp_sum"], states[1])
        expected["input"] = states[0]
        expected["weights"] = values["scores"].masked_fill(later, -torch.inf).softmax(-1)
        expected["state_lengths"] = torch.stack(states).norm(dim=-1).T
        for part, numbers in expected.items():
            torch.testing.assert_close(values[part], numbers, msg=lambda text, at=(name, part): f"{at}: {text}")
        assert [*model.modules()] == modules
        assert not any(module._forward_hooks for module in modules)


@pytest.mark.parametrize("name", INJECTIONS)
@torch.no_grad()
def test_vectors_of_other_tables_have_their_place(block_of, name):
    model = small(injections=[INJECTIONS[name]()])
    step = block_of(model)
    last = step["facts"]["vectors"][-1]["name"]
    assert step["values"][last].equal([*model.hidden_states(IDS)][1])
    assert (last == "stream") == (name in ("n-gram, gated", "per-layer"))
    torch.testing.assert_close(step["values"]["weights"] @ step["values"]["values"], step["values"]["heads"])


@torch.no_grad()
def test_of_many_units_the_strongest_are_shown(block_of):
    model = small(num_kv_heads=2, mlp_dim=2500)
    step = block_of(model)
    values, mlp = step["values"], model.blocks[0].mlp
    units = {"gate": mlp.gate(values["mlp_norm"]), "up": mlp.up(values["mlp_norm"])}
    units["product"] = F.silu(units["gate"]) * units["up"]
    assert step["facts"]["units_a_column"] == 3
    of_column = F.pad(units["product"].abs(), (0, 2)).view(len(IDS), 834, 3).argmax(-1) + 3 * torch.arange(834)
    for name, every in units.items():
        torch.testing.assert_close(values[name], every.gather(-1, of_column))
    torch.testing.assert_close(values["lengths"][:, 7], units["product"].norm(dim=-1))
    assert not any(name.endswith("_matrix") for name in values)


def test_the_formulas_are_those_of_the_model(block_of):
    def formulas_of(model):
        vectors = block_of(model)["facts"]["vectors"]
        return {vector["name"]: (vector["symbol"], vector["formula"]) for vector in vectors}

    tables = small("none", injections=[INJECTIONS[name]() for name in ("value", "per-layer", "added")])
    for model, formula in (
        (small("learned"), "concat(p · v) · W_outᵀ, p = softmax(q · k / √K)"),
        (small("rotary"), "concat(p · v) · W_outᵀ, p = softmax(rotated q · rotated k / √K)"),
        (small("alibi", query_scale=0.5), "concat(p · v) · W_outᵀ, p = softmax(0.5 · q · k / √K + bias)"),
        (tables, "concat(p · (v + ValueEmbedding)) · W_outᵀ, p = softmax(q · k / √K)"),
    ):
        assert formulas_of(model)["attention"][1] == formula
    assert formulas_of(tables)["stream"] == ("y′", "y + PerLayerEmbedding")
    assert formulas_of(tables)["mlp_norm"] == ("n′", "RMSNorm(x′) = w · x′ / √(mean(x′²) + 1e-05)")


def test_models_without_blocks_have_no_such_step(block_of):
    for model in (small(num_layers=0), TransformerEmbedding(50, 8, 16)):
        assert block_of(model) is None


# The view


def numbers_in(place):
    return [float(text.replace("−", "-")) for text in place.all_inner_texts() if text]


def test_the_page_shows_the_numbers_of_the_block_and_of_each_head(tiny, anything, serve, open_page):
    step = steps_of(tiny("rotary"))["block"]
    values = step["values"]
    page = open_page(serve(anything) + "#pipeline?layer=tiny&step=block&position=rotary")
    for token in (1, 5):
        page.locator(".pipe-chips button").nth(token).click()
        for i, vector in enumerate(step["facts"]["vectors"]):
            line = page.locator(f'.block-line[data-vector="{vector["name"]}"]')
            shown = numbers_in(line.locator(".vec > span"))
            assert shown == pytest.approx(values[vector["name"]][token].tolist(), abs=6e-5)
            length, size = line.locator(".block-number").all_inner_texts()
            assert float(length) == pytest.approx(float(values["lengths"][token, i]), abs=6e-5)
            assert int(size) == vector["size"]
            assert line.locator(".block-formula").inner_text().startswith(vector["formula"])
    root = float(values["input"][5, 0] / values["attention_norm"][5, 0])
    shown = page.locator('[data-vector="attention_norm"] small').inner_text()
    assert float(shown.split()[-1]) == pytest.approx(root, abs=6e-5)
    for head in (0, 1):
        page.get_by_label("Head of the first block").select_option(str(head))
        rows = page.locator(f'.block-values[data-head="{head}"] > li')
        assert rows.count() == 7, "six keys and the sum"
        for name in ("score", "weight"):
            shown = numbers_in(rows.locator(f".block-{name}"))
            assert shown[:6] == pytest.approx(values[f"{name}s"][head, 5, :6].tolist(), abs=6e-5)
        assert shown[6:] == [1]
        for row, expected in ((rows.nth(2), values["values"][head, 2]), (rows.last, values["heads"][head, 5])):
            assert numbers_in(row.locator(".vec > span")) == pytest.approx(expected.tolist(), abs=6e-5)
    page.get_by_text("The matrices of this block").click()
    tables = page.locator(".block-tables table")
    assert tables.count() == 7
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert numbers_in(tables.nth(4).locator("td")) == pytest.approx(values["gate_matrix"].flatten().tolist())
    box = page.locator("#learn-definition")
    for word, meaning in (("RMSNorm", "√(mean(x²) + ε)"), ("SwiGLU", "silu(g) = g / (1 + e^(−g))")):
        page.locator(".pipe-head .learn-term", has_text=word).click()
        assert meaning in box.inner_text()
    page.get_by_label("Next step").click()
    box.wait_for(state="hidden")
