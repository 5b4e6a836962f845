import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from embedlayer.cli.plan import plan as command
from embedlayer.errors import SizeError
from embedlayer.planner import PRESETS, plan


def run(*args: str) -> Result:
    return CliRunner().invoke(command, args, catch_exceptions=False)


def rows(output: str) -> dict[str, str]:
    return {line.split("  ")[0]: line for line in output.splitlines()}


def test_one_model_shows_all_its_parts():
    shown = rows(run("gpt2").output)
    assert "38.6 M" in shown["table"]
    assert "147.2 MiB" in shown["table"]
    assert "the table" in shown["head"]
    assert "logits of 4,096 tokens" in shown
    assert "2.1 GiB" in shown["total"]


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


@pytest.mark.parametrize("args", [[], ["gpt2"], ["gpt2", "gemma-2b"], ["--textbook"]])
def test_json_is_a_list_of_plans(args):
    plans = json.loads(run(*args, "--json").output)
    assert all({"name", "parameters", "total_bytes"} <= row.keys() for row in plans)


@pytest.mark.parametrize("args", [[], ["gpt2"], ["--vocab", "262144", "--dim", "16384", "--untied"], ["--textbook"]])
def test_tables_fit_80_columns_and_are_plain_where_no_terminal_is(args):
    output = run(*args).output
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()
    assert "\x1b" not in output


def test_the_textbook_tables_are_printed_by_command():
    shown = rows(run("--textbook").output)
    assert shown["GPT-2 Small"].split()[-6:] == ["38.6", "M", "147.2", "MiB", "73.6", "MiB"]
    assert shown["LLaMA 7B"].split()[-6:] == ["131.1", "M", "500.0", "MiB", "250.0", "MiB"]
    assert "1.0 GiB" in shown["LLaMA 70B"]
    assert run("--textbook", "gpt2").exit_code == 2


@pytest.mark.parametrize("models", [["gpt2"], ["gpt2", "bert-base"]])
def test_a_quantised_plan_says_that_it_is_for_inference_and_has_scales(models):
    assert (
        "int4 is for inference, so nothing is trained; each row has one fp32 scale"
        in run(*models, "--dtype=int4").output
    )


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
