"""The operations that have compiled kernels: what they compute, their definitions, and what computes them where.

This is the only list of them: `embedlayer doctor`, the table of docs/kernels.md and the tests read it.
"""

from dataclasses import dataclass

from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.kernels.kernel import Kernel


@dataclass(frozen=True)
class Operation:
    """An operation that has a kernel."""

    what: str
    definition: str
    cpu: tuple[str, ...]
    gpu: tuple[str, ...]

    def kernels(self, x: Tensor) -> tuple[str, ...]:
        """Return the kernels for tensors on the device of `x`; none for a device that is neither a CPU nor CUDA."""
        return {"cpu": self.cpu, "cuda": self.gpu}.get(device_kind(x), ())

    def refusal(self, x: Tensor) -> str:
        """Return why torch operators compute with tensors such as `x`, or an empty string if kernels do."""
        kernels = self.kernels(x)
        if not kernels:
            return f"there is no kernel for {device_kind(x)}"
        return Kernel(*kernels[0].split("."), has_triton=bool(self.gpu)).refusal(x)


OPERATIONS = [
    Operation("look-up, scale, position vectors and dropout of the input", "inputs.fused:plain_scale_add_drop",
              ("input.gather_scale_add_drop",), ("input.gather_scale_add_drop",)),
    Operation("backward pass of the look-up of the input: gradients of rows and positions",
              "inputs.fused:plain_scale_add_drop",
              ("input.sum_masked_segments",), ()),
    Operation("sums of looked-up rows, of K streams and of bags, and gradients of the rows", "tables.sums:sum_vectors",
              ("sums.sum_rows",), ("sums.sum_streams",)),
    Operation("check of IDs or positions, for look-ups that do not make it", "core.index_checks:clamp_and_record", (),
              ("index_check.clamp_and_record",)),
    Operation("positions of tokens in the documents of a mask", "positions.position:positions_of", (),
              ("input.positions_of_mask",)),
    Operation("rotation of queries and keys, on a GPU together, and its backward pass",
              "positions.rotary.rotation:apply_rotary", ("rotary.rotate_half_split", "rotary.rotate_interleaved"),
              ("rotary.rotate",)),
    Operation("cosines and sines of rotary angles", "positions.rotary.embedding:rotary_angles", (),
              ("rotary.angle_tables",)),
    Operation("look-up and dequantisation of int8 and int4 rows, of GGUF's q8_0 and q4_0 blocks",
              "formats.quantized:dequantise",
              ("quantized.dequantise_8_bits", "quantized.dequantise_4_bits", "quantized.dequantise_blocks"),
              ("quantized.look_up",)),
    Operation("logits of few tokens by quantised rows", "formats.quantized:dequantise",
              ("quantized.logits_of_8_bits", "quantized.logits_of_4_bits", "quantized.logits_of_blocks"),
              ("quantized.logits",)),
    Operation("look-up and dequantisation of rows in the formats of other libraries", "formats.codec:Codec.decode",
              ("codec.read_rows",), ()),
    Operation("logits of few tokens by such rows", "formats.codec:Codec.decode",
              ("codec.read_rows",), ()),
    Operation("look-up, dequantisation and logits of few tokens of GGUF's `Q4_K`, `Q5_K` and `Q6_K`",
              "io.gguf_files:dequantise", ("codec.read_super_blocks",), ()),
    Operation("places of equal IDs in a batch", "row_sparse.gradient:segments_of_equal_ids",
              ("rows.segments_of_equal_ids",), ()),
    Operation("sums of the gradients of equal IDs", "row_sparse.gradient:sum_segments",
              ("rows.sum_segments",), ("rows.sum_equal_rows",)),
    Operation("look-ups by segments", "row_sparse.gradient:segments_of_equal_ids",
              ("rows.gather_segments",), ()),
    Operation("pending updates of rows", "row_sparse.storage:apply_skipped_steps_",
              ("rows.apply_pending", "rows.apply_pending_rowwise"),
              ("rows.apply_pending", "rows.apply_pending_rowwise")),
    Operation("step of `RowAdamW` and `RowAdagrad`", "row_sparse.storage:RowTensors",
              ("rows.adamw_step", "rows.rowwise_step"), ("rows.adamw_step", "rows.rowwise_step")),
    Operation("statistics of the logits of a block: maximum, logsumexp, mean, squares, requested logits",
              "losses.logit_statistics:LogitStatistics.terms", ("softmax.statistics",),
              ("softmax.statistics", "softmax.merge")),
    Operation("gradient of the statistics of the logits", "losses.logit_statistics:LogitStatistics.dlogits_",
              ("softmax.statistics_gradient",),
              ("softmax.statistics_factors", "softmax.statistics_gradient", "softmax.requested_gradient")),
    Operation("losses of tokens by the statistics, and their gradients", "losses.logit_statistics:CrossEntropy.of", (),
              ("softmax.cross_entropy",)),
    Operation("targets that are ignored, and those that are no tokens", "losses.targets:checked_ids", (),
              ("softmax.check_targets",)),
    Operation("K largest logits, by keys that the statistics store", "losses.largest:top_k", ("softmax.largest",),
              ("softmax.statistics_and_keys", "largest.keys_of_lanes", "largest.member_keys", "largest.logits_of_keys",
               "largest.keys_of_logits")),
    Operation("forward and reverse KL of two blocks of logits", "losses.divergence_kinds:ForwardKL.terms",
              ("softmax.divergence",), ("divergences.divergence", "divergences.merge")),
    Operation("Jensen-Shannon divergence", "losses.divergence_kinds:JensenShannon.terms", ("softmax.jensen_shannon",),
              ("divergences.jensen_shannon",)),
    Operation("gradient of a divergence by the student's logits", "losses.divergence_kinds:ForwardKL.dlogits_",
              ("softmax.divergence_gradient",), ("divergences.divergence_gradient",)),
    Operation("float32 sums over chunks of bfloat16 products", "losses.blocks:add_bfloat16_",
              ("softmax.add_bfloat16",), ()),
]  # fmt: skip
