"""Scenes `inside` and `sizes` of the story: their mathematics against torch and the library."""

import functools
import itertools

import torch
from torch import nn

from embedlayer import TokenEmbedding
from embedlayer.opening import OpenedModel

table_of, linear_of = functools.cache(nn.Embedding), functools.cache(nn.Linear)


@torch.no_grad()
def lines_of_torch(tok, pos, ids, dim):
    """The shapes that the four lines of the layer return in torch, and the error at which they stop."""
    tok_emb, pos_emb, query = table_of(*tok), table_of(*pos), linear_of(dim, dim)
    shapes: list[list[int]] = []
    values = {"ids": torch.tensor(ids)}
    steps = {
        "x": lambda: tok_emb(values["ids"]),
        "p": lambda: pos_emb(torch.arange(values["ids"].shape[1])),
        "sum": lambda: values["x"] + values["p"],
        "q": lambda: query(values["sum"]),
    }
    for name, step in steps.items():
        try:
            values[name] = step()
        except (IndexError, RuntimeError) as error:
            text = str(error).removeprefix("addmm: ")  # torch 2.15
            return [*shapes, f"{type(error).__name__}: {text}"]
        shapes.append(list(values[name].shape))
    return shapes


def test_every_choice_of_sizes_returns_or_raises_what_torch_does(story):
    sizes = story("sizes.SIZES")
    choices, batches = story("sizes.allChoices()"), story("sizes.BATCHES")
    assert len(choices) == 400
    code = """choices.map(({ tok, pos }) => sizes.BATCHES.map((ids) => sizes.run({
        tok: tok.map((name) => sizes.SIZES[name]), pos: pos.map((name) => sizes.SIZES[name]), ids,
        dim: sizes.SIZES.D })))"""
    for choice, of_choice in zip(choices, story(code, choices=choices), strict=True):
        tok, pos = ([sizes[name] for name in choice[table]] for table in ("tok", "pos"))
        for ids, lines in zip(batches, of_choice, strict=True):
            reached = [line["error"] or line["shape"] for line in lines if line["error"] or line["shape"]]
            assert reached == lines_of_torch(tok, pos, ids, sizes["D"]), (choice, ids)


def test_a_table_of_one_column_is_added_as_torch_adds_it(story):
    for tok, pos in itertools.product([[10, 1], [10, 4]], [[6, 1], [6, 4]]):
        lines = story("sizes.run({ tok, pos, ids: [[1, 2, 3]], dim: 4 })", tok=tok, pos=pos)
        reached = [line["error"] or line["shape"] for line in lines if line["error"] or line["shape"]]
        assert reached == lines_of_torch(tok, pos, [[1, 2, 3]], 4)


def test_the_right_sizes_run_on_every_batch_and_some_wrong_ones_break_on_few(story):
    sizes, batches = story("sizes.SIZES"), story("sizes.BATCHES")
    assert all(len(ids) == sizes["B"] for ids in batches)
    assert all(max(max(row) for row in ids) < sizes["V"] and len(ids[0]) <= sizes["T"] for ids in batches)
    code = """sizes.allChoices().map((choice) => ({ choice, right: sizes.isRight(choice),
        errors: sizes.BATCHES.filter((ids) => sizes.errorOf(choice, ids)).length }))"""
    found = story(code)
    right = [each for each in found if each["right"]]
    assert [each["choice"]["tok"] for each in right] == [["V", "D"], ["V + 2", "D"]]
    assert all(each["errors"] == 0 for each in right)
    exchanged = next(each for each in found if each["choice"] == {"tok": ["T", "D"], "pos": ["V", "D"]})
    assert 0 < exchanged["errors"] < len(batches)


def test_shares_of_parts_are_those_of_all_parameters(ask, anything, story):
    for layer in ["tiny", "gpt2"]:
        model = ask.raw(anything, "tensors", layer=layer)
        found = story("inside.sharesOf(model.tensors)", model=model)
        sizes = dict(found["parts"])
        assert found["total"] == sum(sizes.values()) == sum(each["size"] for each in model["tensors"])
        table = next(each for each in model["tensors"] if each["part"] == "table")
        assert sizes["table"] == table["shape"][0] * table["shape"][1]
        way = story("inside.wayOf(model)", model=model)
        assert way == ["table", "position", "blocks", "norm", "table"]


def test_copies_and_buffers_are_no_part_of_the_shares_and_an_untied_head_ends_the_way(story):
    def tensor(part, size, is_copy=False):
        return {"name": part, "count": 1, "shape": [size], "size": size, "part": part, "is_copy": is_copy}

    untied = [tensor("table", 6), tensor("blocks", 3), tensor("buffer", 9), tensor("head", 6)]
    assert story("inside.sharesOf(tensors)", tensors=untied) == {
        "parts": [["table", 6], ["blocks", 3], ["head", 6]],
        "total": 15,
    }
    assert story("inside.wayOf(model)", model={"tensors": untied, "is_tied": False}) == ["table", "blocks", "head"]
    assert story("inside.headOf(model)[0]", model={"tensors": untied, "is_tied": False}) is True
    copied = [*untied[:3], tensor("head", 6, is_copy=True)]
    assert story("inside.sharesOf(tensors)", tensors=copied)["total"] == 9
    transformed = [*untied[:3], {**tensor("head", 4), "shape": [2, 2]}, tensor("head", 6)]
    for tied, more in ((copied, []), ([*untied[:3], tensor("head", 6)], []), (transformed, ["head"])):
        model = {"tensors": tied, "is_tied": True}
        assert story("inside.wayOf(model)", model=model) == ["table", "blocks", *more, "table"]
        assert story("inside.headOf(model)", model=model)[0] is False
    assert story("inside.headOf(model)[0]", model={"tensors": untied[:3], "is_tied": False}) is None


def test_the_list_of_the_source_that_is_open_is_shown(serve, of_run, open_page):
    table = OpenedModel("nameless", TokenEmbedding.from_pretrained(torch.randn(30, 6)))
    url = serve(of_run, table)
    page = open_page(url + "#learn?s=inside")
    page.get_by_text("the model: small").wait_for()
    assert "read from the file" in page.locator('[data-value="lookup"]').inner_text()
    assert page.locator('[data-value="lookup"]').inner_text().endswith("Largest difference of all 16 numbers: 0.")
    tensors = page.locator(".inside-name")
    for name in ("table.weight", "blocks.*.attention.query.weight", "norm.weight", "table.weight"):
        tensors.get_by_text(name, exact=True).press("Enter")
    page.locator(".learn-right").wait_for()
    page.get_by_role("combobox", name="Model").select_option("tiny")
    page.get_by_role("combobox", name="Token").select_option(label="cat (ID 6)")
    page.get_by_text("row 6 of table.weight is read from memory").wait_for()
    page.goto(url + "#learn?s=inside&source=1")
    page.get_by_text("nameless is a table by itself").wait_for()
    page.get_by_text("the model: GPT-2 small").wait_for()
    page.get_by_text("Rows of GPT-2 small are not shown").wait_for()
