"""Every command that README and the page of commands print runs as printed."""

import json
import re
import shlex
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from commands import leave_out_answers, run
from launches import free_port
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "command-line.md").read_text()

PLACEHOLDERS = {
    "FILE...": "reference.txt",
    "DIR": "run{number}",
    "CHECKPOINT": "llama",
    "CORPUS": "corpus",
    "DIR|FILE...": "run{number}",
    "DIR|FILE": "run{number}",
    "[OTHER]": "run{number}",
    "TERM": "Gisburn",
    "OUT": "edited",
    "--text FILE": "--text reference.txt",
    "--to N -o OUT": "--to 4096 -o longer",
    "FILE": "vectors.vec",
    "A": "reference.txt",
    "B": "reference.txt",
    "--nnodes 4 --nproc-per-node 8 ...": "--nproc-per-node 1",
    "--nproc-per-node 8": "--nproc-per-node 1",
}
"""What the test writes for each placeholder; `number` grows with every run that is begun."""

SMALL = {
    "EMBEDLAYER_TRAIN_STEPS": "2",
    "EMBEDLAYER_TRAIN_DIM": "24",
    "EMBEDLAYER_TRAIN_HEADS": "2",
    "EMBEDLAYER_TRAIN_LAYERS": "1",
    "EMBEDLAYER_TRAIN_LENGTH": "32",
    "EMBEDLAYER_TRAIN_BATCH_SIZE": "4",
    "EMBEDLAYER_TRAIN_VOCAB_SIZE": "800",
    "EMBEDLAYER_TRAIN_VALIDATION_FRACTION": "0.05",
    "EMBEDLAYER_CORPUS_BUILD_WORKERS": "1",
    "EMBEDLAYER_GENERATE_TOKENS": "4",
    "EMBEDLAYER_EXPLORE_EXPORT_TO": "page.html",
}
"""Options set by the environment, so that a printed command stays as it is: a small model, and a page in a file."""


def printed_commands(page: str) -> list[str]:
    """Return the lines of a page's command blocks (blocks without a language), without comments."""
    blocks = [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M) if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.partition("  #")[0].partition(" # ")[0].rstrip() for line in lines if line.strip()]


def filled(command: str, number: int) -> list[str]:
    """The command's words, with the placeholders filled in."""
    for several in sorted((name for name in PLACEHOLDERS if " " in name), key=len, reverse=True):
        command = command.replace(several, PLACEHOLDERS[several])
    return [PLACEHOLDERS.get(word, word).format(number=number) for word in shlex.split(command)]


def test_every_command_line_is_of_a_program_that_the_test_knows() -> None:
    programs = {command.split()[0] for command in printed_commands(README + PAGE)}
    assert programs == {"make", "embedlayer", "torchrun"}
    assert len(printed_commands(PAGE)) >= 16


def test_readme_prints_commands_of_the_page() -> None:
    commands = [command for command in printed_commands(README) if not command.startswith("make ")]
    assert commands
    assert set(commands) <= set(printed_commands(PAGE))


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split() for command in printed_commands(README) if command.startswith("make ")]
    assert targets
    for words in targets:
        assert len(words) == 2
        assert re.search(rf"^{words[1]}:", makefile, flags=re.M), words


@pytest.mark.filterwarnings("ignore::embedlayer.EmbedLayerWarning")
def test_every_printed_command_runs_and_succeeds(tmp_path, monkeypatch, capfd, unchecked) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    leave_out_answers(monkeypatch)
    text = (
        " first" * 40 + "\n\n".join(topics.values())[:40_000]
    )  # each Python carries another text; all commands' words are tokens
    Path("reference.txt").write_text(text)
    Path("rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in text.split(". ")))
    Path("llama").mkdir()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64}
    Path("llama/config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4, **sizes}))
    number = 0
    for command in printed_commands(PAGE):
        # the lines below are about this run
        number += any(f" train {words}" in command for words in ("FILE...", "A B", "rows.jsonl"))
        program, *words = filled(command, number)
        if program == "embedlayer":
            code, (shown, errors) = run(*words), capfd.readouterr()
        else:  # in this process, as the only rank; in processes of torchrun: distributed/test_torchrun.py
            options = get_args_parser().parse_args(words)
            assert (options.module, options.training_script) == (True, "embedlayer")
            with monkeypatch.context() as patch:
                place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
                for variable, number_or_name in place.items():
                    patch.setenv(variable, str(number_or_name))
                code, (shown, errors) = run(*options.training_script_args), capfd.readouterr()
        assert code == 0, f"{command}\n{shown}\n{errors}"
        assert shown.strip(), command
        assert "Traceback" not in errors, f"{command}\n{errors}"
    assert number == 6
