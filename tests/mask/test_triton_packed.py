"""The kernel that writes the program of packed sequences writes what torch's steps do."""

import pytest
import torch

from tilewright import mask as masks
from tilewright.mask import packed, triton_packed
from tilewright.mask.algebra import HIGHEST, LOWEST, Band

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
BANDS = {
    "full": Band(LOWEST, HIGHEST),
    "causal": Band(0, HIGHEST),
    "window": Band(0, 3),
    "both sides": Band(-2, 5),
    "future": Band(LOWEST, -1),
    "widest": Band(-(2**31) + 2, 2**31 - 2),
}
PACKINGS = {
    "one": ([0, 9], [0, 9], 9, 9),
    "tokens behind the last": ([0, 4, 9], [0, 4, 9], 13, 13),
    "empty ones": ([0, 0, 3, 3, 3, 8, 8], [0, 0, 3, 3, 3, 8, 8], 8, 8),
    "begins late": ([2, 5], [1, 7], 6, 9),
    "none": ([0], [0], 5, 7),
    "no query": ([0, 0], [0, 6], 0, 6),
    "more keys": ([0, 2, 5, 5], [0, 7, 11, 20], 6, 22),
    "fewer keys": ([0, 7, 30], [0, 2, 3], 31, 4),
    "programs carry counts": ([0, 1023, 1024, 1024, 2500, 4097], [0, 3, 900, 1000, 1001, 5000], 4100, 5000),
    "many": (list(range(0, 3000, 3)), list(range(0, 3000, 3)), 3001, 3001),
}


def program(packing, band, dtype, device):
    """The program from the kernel; its memory is poisoned before."""
    cu_q, cu_k, length_q, length_k = packing
    same = cu_q == cu_k
    cu_q, cu_k = (torch.tensor(cu, dtype=dtype, device=device) for cu in (cu_q, cu_k))
    data = torch.full((3 + 3 * length_q,), -77, dtype=torch.int32, device=device)
    limits = packed._limits(band, length_q + length_k)
    triton_packed.write(data, cu_q, cu_q if same else cu_k, (length_q, length_k), limits)
    return data.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("band", BANDS)
def test_it_is_the_program_of_torchs_steps(band, dtype, device):
    for name, packing in PACKINGS.items():
        cu_q, cu_k, length_q, length_k = packing
        cu_q, cu_k = torch.tensor(cu_q), None if cu_q == cu_k else torch.tensor(cu_k)
        table = packed._table(cu_q, cu_q if cu_k is None else cu_k, length_q, length_k, BANDS[band])
        expected = packed.Sequences(table[None], length_k).program("cpu")[1]
        assert torch.equal(program(packing, BANDS[band], dtype, device), expected), name


@pytest.mark.gpu
def test_a_mask_on_a_gpu_is_the_mask_on_a_cpu():
    cu = torch.tensor([0, 5, 5, 1205, 1236])
    on_cpu = masks.sequences(cu, length_q=1300, causal=True, window=(40, None))
    with torch.inference_mode():
        on_gpu = masks.sequences(cu.cuda(), length_q=1300, causal=True, window=(40, None))
        text, data = on_gpu.program("cuda")
    assert (text, data.is_inference()) == ("seq:0", False)
    assert torch.equal(data.cpu(), on_cpu.program("cpu")[1])
    assert torch.equal(on_gpu.table.cpu(), on_cpu.table)
    assert torch.equal(on_gpu.to("cpu").program("cpu")[1], data.cpu())
    joined = on_gpu & masks.dilated(2)
    assert torch.equal(joined.program("cuda")[1].cpu(), (on_cpu & masks.dilated(2)).program("cpu")[1])


@pytest.mark.gpu
def test_a_graph_follows_its_boundaries():
    cu = torch.tensor([0, 3, 1500], dtype=torch.int32, device="cuda")
    masks.sequences(cu, length_q=1500)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data = masks.sequences(cu, length_q=1500, causal=True).program("cuda")[1]
    for last in ([0, 700, 1400], [0, 0, 12]):
        cu.copy_(torch.tensor(last))
        graph.replay()
        expected = masks.sequences(torch.tensor(last), length_q=1500, causal=True).program("cpu")[1]
        assert torch.equal(data.cpu(), expected)
