"""The decoder's own parts of the input embedding of an encoder-decoder model."""

from collections.abc import Sequence

from torch import nn

from embedlayer.families.field_types import Step
from embedlayer.heads.prediction import build_part, part_config
from embedlayer.io.files import JsonObject
from embedlayer.saving import Pretrained, build, describe
from embedlayer.tables.table import TokenTable


class DecoderInput(Pretrained):
    """Parts of the decoder's input embedding that are not those of the encoder; the others are shared."""

    def __init__(
        self,
        recipe: Sequence[Step] | None = None,
        *,
        table: TokenTable | None = None,
        norm: nn.Module | None = None,
        is_scaled: bool = True,
    ) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.recipe = None if recipe is None else tuple(recipe)
        self.table = table
        self.norm = norm

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "recipe": None if self.recipe is None else list(self.recipe),
            "table": None if self.table is None else describe(self.table),
            "norm": part_config(self.norm),
            "is_scaled": self.is_scaled,
        }

    @classmethod
    def from_config(cls: type["DecoderInput"], config: JsonObject) -> "DecoderInput":
        """Build the parts that `config` describes, with initial weights."""
        table = None if config["table"] is None else build(config["table"])
        norm = build_part(nn.LayerNorm, config["norm"])
        return cls.construct(recipe=config["recipe"], table=table, norm=norm, is_scaled=config["is_scaled"])
