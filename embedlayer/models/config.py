"""Configuration of a model: a mapping of constructor arguments, with the attributes that transformers' tools read."""

import json
from typing import Any


class ModelConfig(dict[str, Any]):
    """Constructor arguments of a model as a mapping, and as attributes the names that transformers' tools expect.

    `from_config` builds the model from the mapping, and `save_pretrained` writes the mapping only. The attributes have
    the names of `transformers.PreTrainedConfig`: `model_type`, `vocab_size`, `hidden_size`, `num_hidden_layers`,
    `num_attention_heads`, `num_key_value_heads`, `head_dim`, `intermediate_size`, `max_position_embeddings`,
    `pad_token_id`, `is_encoder_decoder`, `use_cache`. The model keeps attributes that a tool sets
    (`model.config.pad_token_id = 0`); they do not change the model and are not saved.

    There is no `tie_word_embeddings`: a tied head has no weight of its own, so a tool has nothing to tie.

    Args:
        arguments: Constructor arguments.
        attributes: Attributes. The dictionary itself is used, so that all configurations of a model share them.

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
        """Return `to_dict()` as JSON; a value that JSON cannot represent is written as its `repr`.

        Args:
            use_diff: Argument of transformers; it has no effect.
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=repr) + "\n"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """Return this configuration: transformers asks multimodal models for that of their text model.

        The arguments of transformers have no effect.
        """
        return self
