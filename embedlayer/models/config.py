"""The configuration of a model: our mapping of constructor arguments, with the attributes that other libraries read."""

import json
from typing import Any


class ModelConfig(dict[str, Any]):
    """The constructor's arguments of a model, and as attributes what transformers' tools expect of a configuration.

    As a mapping it is what `from_config` builds the model from and `save_pretrained` writes, and nothing else. As
    attributes it has the names of `transformers.PreTrainedConfig`: `model_type`, `vocab_size`, `hidden_size`,
    `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `intermediate_size`,
    `max_position_embeddings`, `pad_token_id`, `is_encoder_decoder`, `use_cache`. Attributes that a tool sets are kept
    by the model (`model.config.pad_token_id = 0`); they change no model and are not saved.

    There is no `tie_word_embeddings`: a tied head has no weight of its own, so no tool has anything to tie.

    Args:
        arguments: The constructor's arguments.
        attributes: The attributes; the dictionary itself is used, so that every holder sees what is set.

    Example:
        >>> config = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=2).config
        >>> config["num_layers"], config.num_hidden_layers, config.hidden_size
        (2, 2, 32)
    """

    def __init__(self, arguments: dict[str, Any] | None = None, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(arguments or {})
        self.__dict__ = {} if attributes is None else attributes

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the constructor's arguments in one plain dictionary."""
        return {**vars(self), **self}

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return `to_dict()` as JSON; `use_diff` is transformers' argument and has no effect.

        An attribute that somebody set and JSON does not know is written as its `repr`.
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=repr) + "\n"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """Return this configuration: the model has no other part than the one for text."""
        return self
