"""The formula of the logits as it is printed: Python computes it from the numbers of the step, and gets the logits."""

import json
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from commands import run
from decoders import small
from explorer_requests import ids_of, steps_of
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE

import embedlayer as el
from embedlayer.heads import PredictionHead
from embedlayer.opening import OpenedModel

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


def computed(steps: dict, head: el.OutputHead | PredictionHead) -> dict[str, torch.Tensor]:
    """Compute every name of the printed formula, such as `z`, by Python."""
    step = steps["head"]
    output = head.output if isinstance(head, PredictionHead) else head
    names: dict[str, object] = {
        "x": step["values"].get("before_norm", steps["dropout"]["values"]["kept"]),
        "w": step["values"].get("norm_weight"),
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
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
    }

    def evaluate(text: str, more: dict[str, object]) -> object:
        for sign, python in SIGNS.items():
            text = text.replace(sign, python)
        return eval(text, {**names, **more})

    if norm := re.match(r"RMSNorm\(x\) = (.*?);", step["note"]):
        names["RMSNorm"] = lambda x: evaluate(norm[1], {"x": x})
    for part in re.split(r", (?=\w+(?:\[\d+\])? = )", step["formula"]):
        name, text = part.split(" = ")
        if token := re.fullmatch(r"z\[(\d+)\]", name):
            z = names["z"]
            assert isinstance(z, torch.Tensor)
            names["z"] = z.index_fill(-1, torch.tensor(int(token[1])), float(str(evaluate(text, {}))))
        else:
            names[name] = evaluate(text, {})
    return {name: value.detach() for name, value in names.items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def check(ask):
    """Compare logits and probabilities of the formula and of the step of a model with its own; return the step."""

    def compare(model):
        answer = ask(OpenedModel("model", model.table, model=model), "pipeline", text="#3 #17 #0 #49 #3")
        steps, ids = steps_of(answer), ids_of(answer)
        logits = (model(ids) if isinstance(model, el.DecoderLM) else model.head(model.input(ids))).detach()
        step, found = steps["head"], computed(steps, model.head)
        torch.testing.assert_close(found["z"], logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["p"], logits.softmax(-1), rtol=0, atol=1e-5)
        for shown, row in zip(step["facts"]["top_tokens"], logits, strict=True):
            assert [each["logit"] for each in shown] == pytest.approx([float(row[t["id"]]) for t in shown], abs=1e-5)
        if "logits" in step["values"]:
            torch.testing.assert_close(step["values"]["logits"], logits[-1:])
            torch.testing.assert_close(found["h"], step["values"]["hidden"], rtol=0, atol=1e-5)
        return step

    return compare


def decoder(table: el.TokenTable | None = None, head: el.OutputHead | None = None) -> el.DecoderLM:
    """A decoder whose final norm has a weight."""
    model = small("learned", table=table, head=head)
    torch.nn.init.normal_(model.norm.weight)
    return model


def heads():
    """Decoders of every head, tied and untied with each option, and of every kind."""
    for options in OPTIONS.values():
        yield decoder(table := TABLES["dense"](), el.OutputHead(table, **options))
        yield decoder(head=el.OutputHead(EMBED_DIM, VOCAB_SIZE, padding_idx=0, **options))
    for kind in TIED_HEADS.values():
        yield decoder(table := TABLES[kind](), el.OutputHead(table))
    for make in UNTIED_HEADS.values():
        yield decoder(head=make())


def test_the_printed_formula_of_a_head_gives_its_logits(check, unchecked):
    for model in heads():
        if model.head.bias is not None:
            torch.nn.init.normal_(model.head.bias)
        check(model)
    model, dense = decoder(), torch.nn.Linear(EMBED_DIM, EMBED_DIM)
    model.register_module("head", PredictionHead(model.head, dense=dense, activation="gelu_new"))
    assert "t = gelu_new(dense(h)), z = t · Wᵀ" in check(model)["formula"]


FAMILIES = ["causal " + each for each in "llama gemma2 cohere2 granite gptj gpt2 opt phi nanochat".split()]
FAMILIES += ["masked " + each for each in "bert roberta electra modernbert".split()]


@pytest.mark.long  # every part of their formulas is in those of the heads above
@pytest.mark.parametrize("family", FAMILIES)
def test_the_printed_formula_of_a_family_gives_the_logits_of_its_head(check, family, tmp_path, unchecked):
    from tiny_models import build, quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(family.split()[1], family.split()[0], {})[1].save_pretrained(tmp_path)
    step = check(el.load(tmp_path))
    assert "final norm are left out" in step["sentence"]
    assert "before_norm" not in step["values"]


def test_a_decoder_of_a_checkpoint_is_read_with_its_final_norm(check, shared_data):
    model = el.load_llama(shared_data / "models" / "stories260K.safetensors")
    step = check(model)
    without_norm = step["values"]["before_norm"][-1] @ model.table.weight.T
    assert (without_norm - step["values"]["logits"][0]).abs().max() > 10, "the norm is no detail"


def test_embed_prints_block_and_logits_and_its_json_has_them(tmp_path, capsys, unchecked):
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
    states = torch.stack([*model.hidden_states(torch.tensor(tokenizer.encode("I love dogs").ids))])
    block, best = content["block"], content["top_tokens"][-1][0]
    torch.testing.assert_close(torch.tensor(block["mlp_sum"]), states[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(block["state_lengths"]), states.norm(dim=-1).T)
    assert best["logit"] == pytest.approx(z.max().item())
    text = printed(tmp_path / "model", "I love dogs")
    assert f"{best['chance']:.1%} (z {best['logit']:.2f})" in text
    assert content["head_formula"] in text
    assert f"s  {block['lengths'][-1][7]:9.4f}  silu(g) · u, silu(g) = g / (1 + e^(−g))" in text
    assert "  ".join(f"{length:.4f}" for length in block["state_lengths"][-1]) in text
    content = json.loads(printed(tmp_path / "table", "dogs", "--json"))
    assert [content[name] for name in ("head_formula", "before_norm", "hidden", "logits")] == [None] * 4
