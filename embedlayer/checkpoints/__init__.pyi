from .layer_report import LayerReport as LayerReport
from .reading.layer import LoadRecord as LoadRecord
from .reading.tensors import LoadedTensor as LoadedTensor
from .vector_files import read_vectors as read_vectors
from .vector_files import write_vectors as write_vectors
from .writer import WriteReceipt as WriteReceipt
