from .mixture import MixedSampler as MixedSampler
from .mixture import TokenMixture as TokenMixture
from .sharded_build import build_in_shards as build_in_shards
from .sharded_build import build_shard as build_shard
from .text_chunks import encode_chunks as encode_chunks
from .text_chunks import read_text_chunks as read_text_chunks
from .text_files import find_text_files as find_text_files
from .windows import WindowSampler as WindowSampler
