from .embedding_layer import LayerReport as LayerReport
from .loader import LoadedTensor as LoadedTensor
from .loader import LoadRecord as LoadRecord
from .vector_files import read_vectors as read_vectors
from .vector_files import write_vectors as write_vectors
from .writer import WriteReceipt as WriteReceipt
