"""Exported programs, run by the runtime of their format."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim


def by_onnxruntime(
    module: nn.Module, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...], sizes: dict[int, Dim]
) -> list[Tensor]:
    """What `onnxruntime` computes of `others` with a module that was exported with `inputs`, for all these sizes."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(
        module.eval(), inputs, dynamo=True, dynamic_shapes=(sizes,) * len(inputs), verbose=False
    )
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    given = zip(session.get_inputs(), others, strict=True)
    return [torch.from_numpy(x) for x in session.run(None, {slot.name: x.numpy() for slot, x in given})]
