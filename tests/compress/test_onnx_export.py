"""A table as a compact ONNX graph, executed by onnxruntime on the CPU."""

import numpy as np
import pytest
import torch

from embedlayer import QuantizedEmbedding, SizeError, TokenEmbedding
from embedlayer.compress import compress_table, export_onnx
from embedlayer.formats import GGUFBlocks

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("to", ["q4_0", "q8_0"])
@pytest.mark.parametrize("width", [64, 40])
def test_onnxruntime_looks_up_and_scores_with_one_initializer(to, width, tmp_path) -> None:
    table = compress_table(TokenEmbedding(300, width, padding_idx=3, scale="sqrt_dim", init_std=1.0), to)
    file = tmp_path / "table.onnx"
    export_onnx(table, file)
    model = onnx.load(file)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node if "codes" in node.input] == [
        "GatherBlockQuantized",
        "MatMulNBits",
    ]
    assert file.stat().st_size < table.nbytes + 2_000
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ids, hidden = torch.randint(0, 300, (2, 5)), torch.randn(3, 4, width)
    vectors, logits = session.run(["vectors", "logits"], {"input_ids": ids.numpy(), "hidden": hidden.numpy()})
    assert torch.equal(torch.from_numpy(vectors), table(ids))
    torch.testing.assert_close(torch.from_numpy(logits), table.logits(hidden), rtol=1e-5, atol=2e-4)
    nothing = {"input_ids": np.zeros((1, 0), np.int64), "hidden": np.zeros((1, 0, width), np.float32)}
    assert np.array_equal(session.run(["vectors"], {**nothing, "input_ids": ids.numpy()})[0], vectors)
    assert np.array_equal(session.run(["logits"], {**nothing, "hidden": hidden.numpy()})[0], logits)
    export_onnx(table, file, logits=False)
    assert [each.name for each in onnxruntime.InferenceSession(file).get_inputs()] == ["input_ids"]


def test_other_tables_are_refused_and_nothing_is_written(tmp_path, monkeypatch) -> None:
    for table in (TokenEmbedding(9, 32), QuantizedEmbedding(9, 32, 4)):
        with pytest.raises(SizeError, match="compress_table\\(table, 'q4_0'\\)"):
            export_onnx(table, tmp_path / "table.onnx")
    monkeypatch.setattr("embedlayer.compress.onnx_export.LARGEST", 100)
    with pytest.raises(SizeError, match="less than 2 GiB"):
        export_onnx(QuantizedEmbedding(9, 32, 4, layout=GGUFBlocks()), tmp_path / "table.onnx")
    assert not list(tmp_path.iterdir())
