from .ids import table_size as table_size
from .tokenizer_match import match_tokenizers as match_tokenizers
from .read import load_tokenizer as load_tokenizer
from .read import save_tokenizer as save_tokenizer
from .token_compression import compressed_tokens as compressed_tokens
from .train import train_tokenizer as train_tokenizer
