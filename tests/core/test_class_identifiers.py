"""The kind identifiers in saved files."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kinds import BAGS, LAYERS, LOOKUP_TABLES, POSITIONS, STREAM_HEADS, TABLES, UNTIED_HEADS
from package_modules import package_modules

import embedlayer as el
from embedlayer import CheckpointError, DecoderLM, LookupTable, Position, TokenEmbedding
from embedlayer.core.class_identifiers import KINDS

NEVER_SAVED = {"AdaptedRows", "ShardedTable"}  # views of another table, which is saved in their place
ABSTRACT = {"AdditivePosition"}
TESTED_ELSEWHERE = {"GGUFEmbedding"}  # blocks of 32 numbers or more: tests/checkpoints/test_gguf.py
OURS = {**TABLES, **BAGS, **POSITIONS, **UNTIED_HEADS, **STREAM_HEADS, **LAYERS}


def subclasses(base: type) -> Iterator[type]:
    each: type
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize(
    ("base", "package", "kinds", "place"),
    [(Position, "positions", POSITIONS, "POSITIONS"), (LookupTable, "tables", LOOKUP_TABLES, "TABLES")],
)
def test_every_scheme_and_table_is_in_the_three_lists(base, package, kinds, place) -> None:
    modules = {module.__name__ for module in package_modules()}  # classes are known once they are imported
    tested, missing = {type(build()) for build in kinds.values()}, []
    for cls in {base, *subclasses(base)}:
        path, name = cls.__module__.removeprefix(f"embedlayer.{package}."), cls.__name__
        if cls.__module__ not in modules or inspect.isabstract(cls) or name in NEVER_SAVED | ABSTRACT:
            continue
        module = path.rpartition(".")[2]
        if getattr(getattr(el, package), name, None) is not cls:
            missing.append(f"from .{path} import {name} as {name}  # embedlayer/{package}/__init__.pyi")
        if f"{cls.__module__}:{name}" not in KINDS.values():
            missing.append(f'"{module}": "{cls.__module__}:{name}",  # KINDS in embedlayer/core/class_identifiers.py')
        if cls not in tested and name not in TESTED_ELSEWHERE:
            missing.append(f'"{module}": lambda: el.{package}.{name}(...),  # {place} in tests/kinds.py')
    assert not missing, "\n".join(["add these lines:", *missing])


def all_kinds(value: object) -> list[str]:
    if isinstance(value, list):
        return [kind for each in value for kind in all_kinds(each)]
    if not isinstance(value, dict):
        return []
    own = [value["kind"]] if isinstance(value.get("kind"), str) else []
    return own + [kind for each in value.values() for kind in all_kinds(each)]


def test_written_configurations_name_kind_identifiers_one_for_each_class(tmp_path) -> None:
    classes: dict[str, str] = {}
    for name in OURS:
        if not name.endswith("of a user"):
            (layer := OURS[name]()).save_pretrained(tmp_path / name)
            description = json.loads((tmp_path / name / "config.json").read_text())
            written, cls = all_kinds(description), type(layer)
            assert written, name
            assert set(written) <= KINDS.keys(), name
            assert classes.setdefault(description["kind"], cls.__qualname__) == cls.__qualname__
            assert KINDS[description["kind"]] == f"{cls.__module__}:{cls.__qualname__}"
    assert len(set(KINDS.values())) == len(KINDS)


class Waves(Position):
    """A position scheme of a user, in a module of the user's."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period

    @property
    def config(self) -> dict[str, object]:
        return {"period": self.period}


class Narrow(TokenEmbedding):
    """A subclass at the top level of a module."""


def test_a_class_of_the_user_is_saved_and_read_back_as_that_class(tmp_path) -> None:
    DecoderLM(TokenEmbedding(20, 8), Waves(7), num_layers=1, num_heads=2).save_pretrained(tmp_path / "model")
    position = DecoderLM.from_pretrained(tmp_path / "model").position
    assert type(position) is Waves
    assert position.period == 7
    Waves(3).save_pretrained(tmp_path / "waves")
    assert kind_in(tmp_path / "waves") == f"{__name__}:Waves"
    Narrow(10, 4).save_pretrained(tmp_path / "narrow")
    read = TokenEmbedding.from_pretrained(tmp_path / "narrow")
    assert type(read) is Narrow
    assert torch.equal(read.weight, Narrow.from_pretrained(tmp_path / "narrow").weight)


def kind_in(folder: Path) -> str:
    kind: str = json.loads((folder / "config.json").read_text())["kind"]
    return kind


def test_a_class_inside_a_function_cannot_be_saved(tmp_path) -> None:
    class Hidden(Waves):
        pass

    with pytest.raises(CheckpointError, match="at the top level of a module"):
        Hidden(3).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_known_classes_that_can_be_saved_are_built_and_no_module_is_imported_for_a_file(tmp_path) -> None:
    Waves(3).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for kind, message in {
        "antigravity:Position": "Import antigravity first if you trust it",
        **dict.fromkeys(["torch.nn.modules.linear:Linear", "pathlib:Path"], "not a class that can be saved"),
        **dict.fromkeys(["os:system", "os:", "torch:nn.", "embedlayer.tables.dense:Missing"], "is not known"),
        **dict.fromkeys([":", "os"], "is not known|not imported"),
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(written | {"kind": kind}))
        with pytest.raises(CheckpointError, match=message):
            Position.from_pretrained(tmp_path)


class Left(Waves):
    def __init__(self, period: int, phase: int = 1) -> None:
        super().__init__(period)
        self.phase = phase


class Both(Left):
    def __init__(self, period: int, phase: int = 1, shift: int = 2) -> None:
        super().__init__(period, phase)
        self.shift = shift

    config = Waves.config


class Faster(Left):
    config = Waves.config


class Again(Both):
    def __init__(self, period: int, phase: int = 1, shift: int = 2, tilt: int = 3) -> None:
        super().__init__(period, phase, shift)
        self.tilt = tilt


def test_arguments_that_a_config_does_not_know_are_those_of_a_constructor_that_was_overridden_alone(tmp_path) -> None:
    for cls, own in ((Waves, set()), (Left, {"phase"}), (Both, set()), (Faster, set()), (Again, {"tilt"})):
        cls(7).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written.keys() - {"kind", "format_version"} == {"period"} | own, cls
