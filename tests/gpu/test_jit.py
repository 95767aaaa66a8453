"""CUDA C++ kernels on a real GPU: results bit for bit; streams, graphs, tapes, clusters, devices; errors in words."""

import pytest
import torch
from tests.gpu.jit_kernels import Product, ProductArgs, Scale, ScaleArgs, ShareArgs, Side, product_mn, scale, share_tile

from tilewright.errors import BackendError
from tilewright.jit import selftest, tape
from tilewright.jit.selftest import Copy, CopyArgs, Tile, whole_numbers
from tilewright.jit.tensor_map import tensor_map

pytestmark = pytest.mark.gpu


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda", torch.cuda.current_device())


def scaled(x, y, factor=2.0, shift=1.0, add=True, offset=0):
    args = ScaleArgs(x, y, factor, shift, add, x.numel(), offset)
    scale((-(-x.numel() // 128),), args, Scale(128, x.dtype), block=128)
    return y


@pytest.mark.parametrize("name", selftest.PROOFS)
def test_selftest(name, hopper):
    assert selftest.PROOFS[name](hopper) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_plain_parameter(dtype):
    x = whole_numbers((1, 1000), dtype, torch.device("cuda")).flatten()
    assert torch.equal(scaled(x, torch.empty_like(x), 1.5, -0.25), (1.5 * x.float() - 0.25).to(dtype))
    assert torch.equal(scaled(x, torch.empty_like(x), 1.5, -0.25, add=False), (1.5 * x.float()).to(dtype))
    tail = scaled(x, torch.zeros_like(x), offset=990)
    assert torch.equal(tail[:990], torch.zeros_like(tail[:990]))
    assert torch.equal(tail[990:], (2 * x.float() + 1).to(dtype)[990:])


def test_the_current_stream_is_used():
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    scaled(x, y)  # compiled and loaded
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        scaled(x, y, 5.0)
    assert y[0].item() == 3, "the default stream did not wait for the side stream's kernel"
    side.synchronize()
    assert y[0].item() == 6


def test_a_cuda_graph_replays_the_launches(hopper):
    x = whole_numbers((200, 72), torch.bfloat16, hopper)
    params = Copy(64, 64, 2, torch.bfloat16)
    scaled(selftest.copy(x, params), torch.empty_like(x))  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = selftest.copy(x, params)
        z = scaled(y, torch.empty_like(y))
    x.add_(1)
    graph.replay()
    assert torch.equal(z, 2 * x + 1)


def test_a_tape_replays_for_other_tensors():
    x, y = torch.randn(500, device="cuda"), torch.empty(500, device="cuda")
    scaled(x, y)
    with tape.listen() as listening:
        scaled(x, y)
    recorded = listening.finish([x, y])
    other, out = torch.randn(500, device="cuda"), torch.empty(500, device="cuda")
    recorded.replay(x.get_device(), [other.data_ptr(), out.data_ptr()])
    assert torch.equal(out, 2 * other + 1)


def test_a_tape_replays_tensor_maps(hopper):
    x, params = whole_numbers((64, 64), torch.bfloat16, hopper), Copy(64, 64, 2, torch.bfloat16)
    y = torch.empty_like(x)
    maps = tensor_map(x, (64, 64)), tensor_map(y, (64, 64))
    with tape.listen() as listening:
        selftest.tma_copy((1,), CopyArgs(*maps, 64, 64), params, block=32, shared_bytes=16384)
    recorded = listening.finish([x, y])
    for i in range(3):
        other, out = x + i, torch.empty_like(x)
        recorded.replay(x.get_device(), [other.data_ptr(), out.data_ptr()])
        assert torch.equal(out, other)


def test_blocks_of_a_cluster_share_a_tile(hopper):
    x = torch.randn(32, 128, device=hopper)
    total = torch.ones(64, 128, device=hopper)
    maps = tensor_map(x, (32, 32)), tensor_map(total, (32, 32))
    share_tile((8,), ShareArgs(*maps, 32), Side(32), block=32, cluster=(2, 1, 1))
    assert torch.equal(total, 1 + torch.cat([x, x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_that_run_along_m_and_n(hopper, dtype):
    a, b = whole_numbers((64, 64), dtype, hopper), whole_numbers((64, 128), dtype, hopper)
    d = torch.full((64, 128), 77.0, device=hopper)
    maps = tensor_map(a, (64, 64), swizzle=128), tensor_map(b, (64, 64), swizzle=128)
    product_mn((1,), ProductArgs(*maps, d), Product(dtype), block=128, shared_bytes=3 * 64 * 128)
    assert torch.equal(d, a.float().T @ b.float())


def test_a_map_of_a_strided_view(hopper):
    x = whole_numbers((100, 256), torch.bfloat16, hopper)[:, 64:192]
    assert torch.equal(selftest.copy(x, Copy(32, 64, 2, torch.bfloat16)), x)


def test_other_memory_at_the_same_address_is_served_by_the_same_map(hopper):
    params = Copy(32, 64, 2, torch.bfloat16)
    for i in range(3):
        x = whole_numbers((64, 64), torch.bfloat16, hopper) + i
        assert torch.equal(selftest.copy(x, params), x)
        del x


def test_every_device_is_served(hopper):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before = torch.cuda.current_device()
    a = whole_numbers((64, 64), torch.bfloat16, torch.device("cuda", 1))
    found = selftest.multiply(a, a, Tile(64, 2, torch.bfloat16, torch.float32))
    assert torch.equal(found, a.float() @ a.float().T)
    assert torch.cuda.current_device() == before


def test_too_much_shared_memory_is_said(hopper):
    x = whole_numbers((64, 64), torch.bfloat16, hopper)
    maps = tensor_map(x, (64, 64)), tensor_map(x, (64, 64))
    with pytest.raises(BackendError, match="shared"):
        selftest.tma_copy((1,), CopyArgs(*maps, 64, 64), Copy(64, 64, 3, x.dtype), block=32, shared_bytes=300_000)


def test_a_grid_of_no_blocks_launches_nothing():
    x = torch.empty(0, device="cuda")
    scaled(x, torch.empty_like(x))
    torch.cuda.synchronize()


def test_launch_shapes_of_one_kernel_need_different_shared_memory():
    x = torch.randn(1000, device="cuda")
    args = ScaleArgs(x, torch.empty_like(x), 2.0, 1.0, True, x.numel(), 0)
    for shared_bytes in (90 << 10, 60 << 10, 90 << 10, 0, 95 << 10, 90 << 10):
        args.y.fill_(torch.nan)
        scale((8,), args, Scale(128, x.dtype), block=128, shared_bytes=shared_bytes)
        torch.testing.assert_close(args.y, 2 * x + 1)
