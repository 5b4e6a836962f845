"""axolotl: the plugin `embedlayer.integrations.axolotl.EmbedLayerPlugin`, a line of its YAML.

This module imports axolotl, so no other module imports it: axolotl does, by the name in `plugins:`.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

from embedlayer.checkpoints.patching import patch
from embedlayer.core.errors import SizeError

OTHER_LOSSES = (
    "cut_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "liger_cross_entropy",
    "chunked_cross_entropy",
)
"""Options of axolotl that replace the loss of a model by another one, so that ours would not be called."""

WITHOUT_LOGITS = ("dpo", "ipo", "kto", "grpo", "gdpo")
"""Values of `rl:` whose trainers of TRL `patch_trainer` gives losses without logits."""


class EmbedLayerPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin of axolotl that patches its model, so that the loss needs no logits."""

    def pre_model_load(self, cfg: Any) -> None:
        """Check that no option of the configuration replaces the loss of the model."""
        if found := [name for name in OTHER_LOSSES if cfg.get(name)]:
            raise SizeError(
                f"{', '.join(found)} and EmbedLayerPlugin both replace the loss of the model: leave one of them out."
            )

    def post_model_build(self, cfg: Any, model: Any) -> None:
        patch(model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give a trainer of TRL losses without logits."""
        if cfg.get("rl") in WITHOUT_LOGITS:
            from embedlayer.integrations import patch_trainer

            patch_trainer(trainer, row_sparse=False)
