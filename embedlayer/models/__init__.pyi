from .decoder import CausalLMOutput as CausalLMOutput
from .generation import next_tokens as next_tokens
from .sampling import SamplingOptions as SamplingOptions
from .sampling import sample as sample
