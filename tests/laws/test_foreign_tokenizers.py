"""Commands x faults of a tokenizer: what the tokenizers library raises, panics too, is one line, in workers as well."""

import json
from pathlib import Path

import pytest
from commands import run
from covering import looped
from tokenizers import Tokenizer, models

import embedlayer as el

FAULTS = {
    "an exception": {},  # there is no unknown token
    "a panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}
COMMANDS = (
    "embed {0}/saved dog",
    "generate {0}/saved dog",
    "inspect {0}/saved --text {0}/text.txt",
    "corpus build {0}/text.txt --tokenizer {0}/saved -o {0}/corpus --workers 2",
    "train {0}/text.txt -o {0}/run --tokenizer-from {0}/saved --steps 1 --dim 8",
)


@pytest.fixture(scope="module", params=FAULTS)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    el.DecoderLM(el.TokenEmbedding(3, 8), el.RotaryEmbedding(4), num_layers=1, num_heads=2).save_pretrained(
        folder / "saved"
    )
    sound = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="<unk>"))
    (folder / "saved" / "tokenizer.json").write_text(json.dumps(json.loads(sound.to_str()) | FAULTS[request.param]))
    (folder / "text.txt").write_text("the dog sat . " * 200)
    return folder


@looped("command", COMMANDS)
def test_a_command_prints_one_line(folder: Path, command: str, capsys) -> None:
    before = sorted(path.name for path in folder.iterdir())
    code = run(*command.format(folder).split())
    said = capsys.readouterr().err
    assert code == 2
    assert "TokenizerError: The tokenizer cannot " in said
    assert "Traceback" not in said
    left = {path.name for path in folder.iterdir()} - {*before}
    assert left <= {"corpus"}  # whose plan is kept, and its shards are not
