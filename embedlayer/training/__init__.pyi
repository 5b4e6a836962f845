from .parallel import ParallelContext as ParallelContext
from .parallel import parallel_context as parallel_context
