"""Delays of streams: equal to those of MusicGen and Dia, and undone exactly."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embedlayer import ShapeError, SizeError
from embedlayer.inputs import delay_streams, undelay_streams

PAD, BOS = 99, 98


def codes(*shape: int) -> Tensor:
    return torch.randint(90, shape)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 9), st.sampled_from([(), (2,), (2, 3)]))
def test_the_inverse_is_exact_for_any_list_of_delays(delays: list[int], length: int, batch: tuple[int, ...]) -> None:
    ids = codes(*batch, length, len(delays))
    delayed = delay_streams(ids, delays, PAD, bos=BOS)
    assert delayed.shape == (*batch, length + max(delays), len(delays))
    assert torch.equal(undelay_streams(delayed, delays), ids)
    for k, delay in enumerate(delays):
        assert (delayed[..., :delay, k] == BOS).all()
        assert (delayed[..., delay + length :, k] == PAD).all()


@pytest.mark.parametrize("stereo", [False, True])
def test_delays_equal_those_of_musicgen(stereo: bool) -> None:
    modeling = pytest.importorskip("transformers.models.musicgen.modeling_musicgen")
    streams, length = 8 if stereo else 4, 9
    model = SimpleNamespace(num_codebooks=streams, config=SimpleNamespace(audio_channels=2 if stereo else 1))
    delays = [k // 2 if stereo else k for k in range(streams)]
    ids = torch.cat([torch.full((3, 1, streams), PAD), codes(3, length, streams)], 1)  # bos and pad are one ID
    delayed = delay_streams(ids, delays, PAD)
    by_row = ids.mT.reshape(3 * streams, -1)
    shape = (by_row, PAD, delayed.shape[1])
    _, mask = modeling.MusicgenForCausalLM.build_delay_pattern_mask(model, *shape)
    assert torch.equal(delayed.mT.reshape(3 * streams, -1), mask)


def test_delays_equal_those_of_moshi() -> None:
    modeling = pytest.importorskip("transformers.models.moshi.modeling_moshi")
    ids = codes(2, 7, 4)
    delayed = delay_streams(ids, (0, 1, 1, 1), PAD, bos=BOS)
    build = modeling.MoshiForConditionalGeneration.build_delay_pattern_mask
    assert torch.equal(delayed.mT, build(None, ids.mT, BOS, PAD, 8)[1])


@pytest.mark.parametrize("delays", [[0, 8, 9, 10, 11, 12, 13, 14, 15], [2, 0, 1]])
def test_delays_equal_those_of_dia(delays: list[int]) -> None:
    processing = pytest.importorskip("transformers.models.dia.processing_dia")
    ids, most = codes(2, 7, len(delays)), max(delays)
    audio = torch.nn.functional.pad(ids, (0, 0, 0, most), value=PAD)
    sizes = {"bsz": 2, "seq_len": 7 + most, "num_channels": len(delays), "delay_pattern": delays}
    build, apply = processing.DiaProcessor.build_indices, processing.DiaProcessor.apply_audio_delay
    theirs = apply(audio, PAD, BOS, build(**sizes))
    assert torch.equal(delay_streams(ids, delays, PAD, bos=BOS), theirs)
    undone = apply(theirs, PAD, BOS, build(**sizes, revert=True))[:, :7]
    assert torch.equal(undelay_streams(theirs, delays), undone)


def test_delays_that_do_not_fit_are_refused(unchecked: None) -> None:
    for delays in ((0, -1), (0, 1, 2), (0,)):
        with pytest.raises(SizeError):
            delay_streams(codes(4, 2), delays, PAD)
    with pytest.raises(ShapeError):
        undelay_streams(codes(4, 2), (5, 5))
