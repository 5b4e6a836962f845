from .data_parallel import distributed_data_parallel as distributed_data_parallel
from .fsdp import register_fsdp_methods as register_fsdp_methods
from .sharded import ShardedTable as ShardedTable
from .sharded import shard_table as shard_table
from .sharded import sharded_parameters as sharded_parameters
from .state import distributed_state as distributed_state
from .state import load_distributed_state as load_distributed_state
