"""What tests skip for older releases is what these releases really lack."""

import pytest
import torch
import transformers
from releases import LACKING, LACKING_KINDS, LACKING_TYPES, has
from tiny_models import FURTHER_KINDS, KINDS, OTHER_KINDS, model_types

from embedlayer.core.errors import TESTED, release
from embedlayer.families import TRANSFORMERS_VERSION


def installed_types() -> set[tuple[str, str]]:
    """Return all pairs of a kind and a model type."""
    return {(kind, name) for kind in (*KINDS, *FURTHER_KINDS, *OTHER_KINDS) for name in model_types(kind)}


def test_nothing_is_skipped_with_the_pinned_releases() -> None:
    if release(torch.__version__) < (2, 13) or release(transformers.__version__) < release(TRANSFORMERS_VERSION):
        pytest.skip("older than the pinned releases")
    assert [name for name in LACKING if not has(name)] == []
    assert {*transformers.CONFIG_MAPPING} >= LACKING_TYPES
    assert {(kind, name) for kind, names in LACKING_KINDS.items() for name in names} <= installed_types()


def test_the_oldest_releases_lack_what_is_listed() -> None:
    if (torch.__version__.partition("+")[0], transformers.__version__) != ("2.9.1", "5.6.0"):
        pytest.skip("not the oldest releases")
    assert [name for name in LACKING if has(name)] == []
    assert not LACKING_TYPES & {*transformers.CONFIG_MAPPING}
    assert not {(kind, name) for kind, names in LACKING_KINDS.items() for name in names} & installed_types()
    assert all(
        release(oldest) == release(module.__version__)
        for (oldest, _), module in zip((TESTED["torch"], TESTED["transformers"]), (torch, transformers), strict=True)
    )
