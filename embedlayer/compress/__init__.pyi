from .convert import compress_table as compress_table
from .convert import replace_table as replace_table
from .onnx_export import export_onnx as export_onnx
from .report import CompressionResult as CompressionResult
from .report import compare_compression as compare_compression
from .report import loss_on_text as loss_on_text
from .report import row_error as row_error
