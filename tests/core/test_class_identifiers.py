"""The kind identifiers in saved files."""

import inspect
import json

import pytest
import torch
from kinds import LAYERS, LOOKUP_TABLES, POSITIONS, STREAM_HEADS, TABLES, UNTIED_HEADS
from package_modules import package_modules

import embedlayer
from embedlayer import CheckpointError, DecoderLM, LookupTable, Position, TokenEmbedding
from embedlayer.core.class_identifiers import KINDS, class_of, kind_of
from embedlayer.heads.peft import AdaptedRows
from embedlayer.saving import Described, Pretrained, build, describe

NEVER_SAVED = {
    AdaptedRows,
    embedlayer.distributed.ShardedTable,
}  # views of another table, which is saved in their place
ABSTRACT = {"Described", "Pretrained", "AdditivePosition", "RotaryScaling"}


TESTED_ELSEWHERE = {embedlayer.tables.GGUFEmbedding}  # blocks of 32 numbers or more: tests/checkpoints/test_gguf.py


def savable_classes() -> set[type]:
    modules = {module.__name__ for module in package_modules()}  # classes are known once they are imported
    waiting: list[type] = [Described]
    found: set[type] = set()
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__ in modules and not inspect.isabstract(cls) and cls.__name__ not in ABSTRACT:
            found.add(cls)
    return found - NEVER_SAVED


def public_classes() -> set[type]:
    packages = [embedlayer, *(getattr(embedlayer, name) for name in embedlayer.__all__)]
    values = [getattr(each, name) for each in packages for name in getattr(each, "__all__", ())]
    return {value for value in values if isinstance(value, type)}


def test_every_public_savable_class_has_one_identifier() -> None:
    classes = {class_of(kind) for kind in KINDS}
    assert classes <= savable_classes()
    assert savable_classes() & public_classes() <= classes
    assert len(set(KINDS.values())) == len(KINDS)
    assert all(kind_of(class_of(kind)) == kind for kind in KINDS)


@pytest.mark.parametrize(
    ("base", "package", "kinds", "place"),
    [(Position, "positions", POSITIONS, "POSITIONS"), (LookupTable, "tables", LOOKUP_TABLES, "TABLES")],
)
def test_every_scheme_and_table_is_in_the_three_lists(base, package, kinds, place) -> None:
    tested, missing = {*TESTED_ELSEWHERE, *(type(build()) for build in kinds.values())}, []
    for cls in savable_classes():
        if issubclass(cls, base):
            path, name = cls.__module__.removeprefix(f"embedlayer.{package}."), cls.__name__
            module = path.rpartition(".")[2]
            if cls not in public_classes():
                missing.append(f"from .{path} import {name} as {name}  # embedlayer/{package}/__init__.pyi")
            if f"{cls.__module__}:{name}" not in KINDS.values():
                missing.append(
                    f'"{module}": "{cls.__module__}:{name}",  # KINDS in embedlayer/core/class_identifiers.py'
                )
            if cls not in tested:
                missing.append(f'"{module}": lambda: el.{package}.{name}(...),  # {place} in tests/kinds.py')
    assert not missing, "\n".join(["add these lines:", *missing])


def all_kinds(value: object) -> list[str]:
    if isinstance(value, list):
        return [kind for each in value for kind in all_kinds(each)]
    if not isinstance(value, dict):
        return []
    own = [value["kind"]] if isinstance(value.get("kind"), str) else []
    return own + [kind for each in value.values() for kind in all_kinds(each)]


OURS = {**TABLES, **POSITIONS, **UNTIED_HEADS, **STREAM_HEADS, **LAYERS}


@pytest.mark.parametrize("name", [name for name in OURS if not name.endswith("of a user")])
def test_a_written_configuration_names_kind_identifiers_only(name, tmp_path) -> None:
    OURS[name]().save_pretrained(tmp_path)
    kinds = all_kinds(json.loads((tmp_path / "config.json").read_text()))
    assert kinds
    assert set(kinds) <= KINDS.keys()


class Waves(Position):
    """A position scheme of a user, in a module of the user's."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period

    @property
    def config(self) -> dict[str, object]:
        return {"period": self.period}


def test_a_class_of_the_user_is_saved_and_read_back(tmp_path) -> None:
    DecoderLM(TokenEmbedding(20, 8), Waves(7), num_layers=1, num_heads=2).save_pretrained(tmp_path)
    position = DecoderLM.from_pretrained(tmp_path).position
    assert type(position) is Waves
    assert position.period == 7
    assert describe(position)["kind"] == f"{__name__}:Waves"


def test_a_module_that_a_file_names_is_never_imported(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="Import antigravity first if you trust it"):
        build({"kind": "antigravity:Position"})


def test_a_class_inside_a_function_cannot_be_saved(tmp_path) -> None:
    class Hidden(Waves):
        pass

    with pytest.raises(CheckpointError, match="at the top level of a module"):
        Hidden(3).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["torch.nn.modules.linear:Linear", "pathlib:Path"])
def test_only_classes_that_can_be_saved_are_built(kind) -> None:
    with pytest.raises(CheckpointError, match="not a class that can be saved"):
        build({"kind": kind})


@pytest.mark.parametrize("kind", ["os:system", "os:", ":", "os", "torch:nn.", "embedlayer.tables.dense:Missing"])
def test_what_is_no_class_is_unknown(kind) -> None:
    with pytest.raises(CheckpointError, match="is not known|not imported"):
        build({"kind": kind})


def test_a_subclass_of_a_layer_is_read_back_as_that_subclass(tmp_path) -> None:
    Narrow(10, 4).save_pretrained(tmp_path)
    assert type(Pretrained.from_pretrained(tmp_path)) is Narrow
    assert torch.equal(TokenEmbedding.from_pretrained(tmp_path).weight, Narrow.from_pretrained(tmp_path).weight)


class Narrow(TokenEmbedding):
    """A subclass at the top level of a module."""
