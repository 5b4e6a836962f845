from .decoder import CausalLMOutput as CausalLMOutput
from .generate import SamplingOptions as SamplingOptions
from .generate import next_tokens as next_tokens
