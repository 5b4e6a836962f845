from .loop import Trainer as Trainer
from .loop import TrainingOptions as TrainingOptions
from .monitor import EmbeddingMonitor as EmbeddingMonitor
from .monitor import MonitorReport as MonitorReport
from .parallel import ParallelContext as ParallelContext
from .parallel import parallel_context as parallel_context
from .run_directory import RunDirectory as RunDirectory
