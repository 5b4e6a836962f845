"""The formula of the logits as it is printed: Python computes it from the numbers of the step, and gets the logits."""

import json
import re
import warnings
from typing import get_args

import pytest
import torch
from commands import run
from covering import some
from decoders import small
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE

import embedlayer as el
from embedlayer.explorer.pipeline import Pipeline, pipeline
from embedlayer.explorer.tiny_layer import TEXTS, WORDS, TinyPosition, tiny_layer
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import ACTIVATIONS, PredictionHead

TEXT = "#3 #17 #0 #49 #3"
SIGNS = {"· Wᵀ": "@ W.T", "·": "*", "√": "sqrt", "x²": "x * x", "−∞": "-inf", "z[": "z[..., "}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "scale": {"logit_scale": 0.0625},
    "a scale of many digits": {"logit_scale": 1 / 3},
    "bias": {"bias": True},
    "soft cap": {"softcap": 3.0},
    "masked padding": {"mask_padding": True},
    "all": {"logit_scale": -1.7, "bias": True, "softcap": 30.0, "mask_padding": True},
}


def computed(walked: Pipeline, head: OutputHead | PredictionHead) -> dict[str, torch.Tensor]:
    """Compute every name of the printed formula, such as `z`, by Python."""
    step = walked.step("head")
    assert step is not None
    output = head.output if isinstance(head, PredictionHead) else head
    names: dict[str, object] = {
        "x": step.values.get("before_norm", walked.vectors),
        "w": step.values.get("norm_weight"),
        "W": output.weight if output.table is None else output.table.rows(0, output.vocab_size),
        "b": output.bias,
        "temperature": 1,
        "inf": torch.inf,
        "softmax": lambda z: z.softmax(-1),
        "mean": lambda x: x.mean(-1, keepdim=True),
        "dense": getattr(head, "dense", None),
        "LayerNorm": getattr(head, "norm", None),
        "sqrt": torch.sqrt,
        "tanh": torch.tanh,
        **ACTIVATIONS,
    }

    def evaluate(text: str, more: dict[str, object]) -> object:
        for sign, python in SIGNS.items():
            text = text.replace(sign, python)
        return eval(text, {**names, **more})

    if norm := re.match(r"RMSNorm\(x\) = (.*?);", step.note):
        names["RMSNorm"] = lambda x: evaluate(norm[1], {"x": x})
    for part in re.split(r", (?=\w+(?:\[\d+\])? = )", step.formula):
        name, text = part.split(" = ")
        if token := re.fullmatch(r"z\[(\d+)\]", name):
            z = names["z"]
            assert isinstance(z, torch.Tensor)
            names["z"] = z.index_fill(-1, torch.tensor(int(token[1])), float(str(evaluate(text, {}))))
        else:
            names[name] = evaluate(text, {})
    return {name: value.detach() for name, value in names.items() if isinstance(value, torch.Tensor)}


def check(walked: Pipeline, head: OutputHead | PredictionHead, logits: torch.Tensor) -> None:
    """Compare logits and probabilities of the formula and of the step with those of the model."""
    step, found = walked.step("head"), computed(walked, head)
    assert step is not None
    torch.testing.assert_close(found["z"], logits.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found["p"], logits.detach().softmax(-1), rtol=0, atol=1e-5)
    for shown, row in zip(step.facts["top_tokens"], logits, strict=True):
        expected = [row[token["id"]].item() for token in shown]
        assert [token["logit"] for token in shown] == pytest.approx(expected, abs=1e-5)
    if "logits" in step.values:
        torch.testing.assert_close(step.values["logits"], logits[-1:].detach())
        torch.testing.assert_close(found["h"], step.values["hidden"].detach(), rtol=0, atol=1e-5)


def decoder(table: el.TokenTable | None = None, head: OutputHead | None = None) -> el.DecoderLM:
    """A decoder whose final norm has a weight."""
    model = small("learned", table=table, head=head)
    torch.nn.init.normal_(model.norm.weight)
    return model


HEADS = {
    **{f"{name}, {which}": (name, options) for which, options in OPTIONS.items() for name in ("tied", "untied")},
    **{name: (name, {}) for name in [*TIED_HEADS, *UNTIED_HEADS]},
}


@pytest.mark.parametrize("name", HEADS)
def test_the_printed_formula_of_a_head_gives_its_logits(name, unchecked):
    torch.manual_seed(0)
    kind, options = HEADS[name]
    table = TABLES[TIED_HEADS.get(kind, "dense")]()
    if kind in UNTIED_HEADS and not options:
        head = UNTIED_HEADS[kind]()
    elif kind == "untied":
        head = OutputHead(EMBED_DIM, VOCAB_SIZE, padding_idx=0, **options)
    else:
        head = OutputHead(table, **options)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    model = decoder(table, head)
    walked = pipeline(model, None, TEXT)
    check(walked, model.head, model(torch.tensor([token["id"] for token in walked.tokens])))


def test_a_transform_of_a_decoders_head_is_in_the_formula(unchecked):
    torch.manual_seed(0)
    model = decoder()
    dense = torch.nn.Linear(EMBED_DIM, EMBED_DIM)
    model.register_module("head", PredictionHead(model.head, dense=dense, activation="gelu_new"))
    walked = pipeline(model, None, TEXT)
    assert "t = gelu_new(dense(h)), z = t · Wᵀ" in walked.step("head").formula
    check(walked, model.head, model(torch.tensor([token["id"] for token in walked.tokens])))


@pytest.mark.parametrize("position", get_args(TinyPosition))
@pytest.mark.parametrize("tied", [True, False])
def test_the_tiny_layer_has_all_numbers_of_the_formula(position, tied):
    model = tiny_layer(position, tied=tied)
    walked = pipeline(model, WORDS, TEXTS[0])
    check(walked, model.head, model(torch.tensor([token["id"] for token in walked.tokens])))
    step = walked.step("head")
    x, h, rows = (step.values[name][-1:].double() for name in ("before_norm", "hidden", "head_rows"))
    rows = step.values["head_rows"].double()
    root_mean_square = x.square().mean(-1, keepdim=True).add(step.facts["norm_eps"]).sqrt()
    torch.testing.assert_close(h, step.values["norm_weight"] * x / root_mean_square, rtol=0, atol=1e-5)
    torch.testing.assert_close(step.values["logits"].double(), h @ rows.T, rtol=0, atol=1e-5)
    assert torch.equal(step.values["head_rows"], model.table.weight if tied else model.head.weight)


FAMILIES = {
    "causal": "llama gemma2 cohere2 granite gptj gpt2 opt phi nanochat".split(),
    "masked": "bert roberta electra modernbert".split(),
}
ALWAYS = [("causal", "llama"), ("causal", "gemma2"), ("causal", "cohere2"), ("causal", "gptj"), ("masked", "bert")]
"""A plain product, a cap, a factor, a bias, and a transform of the hidden state."""


@pytest.mark.parametrize(
    ("kind", "model_type"), some(ALWAYS, [(kind, each) for kind in FAMILIES for each in FAMILIES[kind]])
)
def test_the_printed_formula_of_a_family_gives_the_logits_of_its_head(kind, model_type, tmp_path, unchecked):
    from tiny_models import build, quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(model_type, kind, {})[1].save_pretrained(tmp_path)
    layer = el.load(tmp_path)
    walked = pipeline(layer, None, TEXT)
    step = walked.step("head")
    assert "final norm are left out" in step.to_json()["sentence"]
    assert "before_norm" not in step.values
    check(walked, layer.head, layer.head(layer.input(torch.tensor([token["id"] for token in walked.tokens]))))


def test_a_decoder_of_a_checkpoint_is_read_with_its_final_norm(shared_data):
    model = el.load_llama(shared_data / "models" / "stories260K.safetensors")
    walked = pipeline(model, None, TEXT)
    logits = model(torch.tensor([token["id"] for token in walked.tokens]))
    check(walked, model.head, logits)
    without_norm = walked.step("head").values["before_norm"] @ model.table.weight.T
    assert (without_norm - logits).abs().max() > 10, "the norm is no detail"


def test_embed_prints_logits_and_its_json_has_them(tmp_path, capsys, unchecked):
    torch.manual_seed(0)
    model, tokenizer = decoder(), el.train_tokenizer("I love dogs and dogs love me . " * 3, kind="word")
    model.save_pretrained(tmp_path / "model", tokenizer=tokenizer)
    el.TokenEmbedding(VOCAB_SIZE, 8).save_pretrained(tmp_path / "table", tokenizer=tokenizer)

    def printed(*arguments):
        assert run("embed", *arguments) == 0
        return capsys.readouterr().out

    content = json.loads(printed(tmp_path / "model", "I love dogs", "--json"))
    x, h, z = (torch.tensor(content[name]) for name in ("before_norm", "hidden", "logits"))
    torch.testing.assert_close(h, model.norm(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(z, h[-1:] @ model.table.weight.T, rtol=0, atol=1e-5)
    assert content["head_formula"] == "h = RMSNorm(x), z = h · Wᵀ, p = softmax(z / temperature)"
    best = content["top_tokens"][-1][0]
    assert best["logit"] == pytest.approx(z.max().item())
    text = printed(tmp_path / "model", "I love dogs")
    assert f"{best['chance']:.1%} (z {best['logit']:.2f})" in text
    assert content["head_formula"] in text
    content = json.loads(printed(tmp_path / "table", "dogs", "--json"))
    assert [content[name] for name in ("head_formula", "before_norm", "hidden", "logits")] == [None] * 4
