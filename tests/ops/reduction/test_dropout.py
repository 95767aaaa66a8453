"""dropout(x, p, seed, offset): one mask for every backend, from Random123's Philox; what is kept is scaled."""

import pytest
import torch

from tilewright.errors import InputError
from tilewright.ops.philox import philox
from tilewright.ops.reduction.dropout import DropoutArgs, dropout, keep_mask

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
# counter, key and result of Philox 4x32-10 in the known answers of Random123 1.14
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(low, high):
    """The int64 of two words of 32 bits."""
    number = low | high << 32
    return number - (1 << 64) if number >= 1 << 63 else number


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    words = philox(torch.tensor(signed(*key)), *(torch.tensor([c]) for c in counter))
    assert tuple(int(w) for w in words) == expected


def test_the_mask_of_the_documentation():
    """Word i % 4 of counter (i / 4, offset) below p * 2^32: by integers of Python."""

    def words(seed, counter, offset):
        k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        c = [counter & 0xFFFFFFFF, counter >> 32, offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF]
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return c

    seed, offset, p = -5, 2**33 + 7, 0.25
    kept = [words(seed, i // 4, offset)[i % 4] >= p * 2**32 for i in range(30)]
    x = torch.arange(1.0, 31.0).view(2, 15)
    expected = torch.where(torch.tensor(kept).view(2, 15), x / (1 - p), 0)
    torch.testing.assert_close(dropout(x, p, seed=seed, offset=offset), expected)


def test_numbers_and_tensors_give_one_mask():
    x = torch.randn(5, 33)
    y = dropout(x, seed=3, offset=4)
    assert torch.equal(y, dropout(x, seed=torch.tensor(3), offset=torch.tensor(4)))
    assert torch.equal(y, dropout(x.t().contiguous().t(), seed=3, offset=4)), "strides are no part of an index"
    assert torch.equal(y == 0, dropout(x.bfloat16(), seed=3, offset=4) == 0)
    for other in ({"seed": 4, "offset": 4}, {"seed": 3, "offset": 5}, {"seed": 3}):
        assert not torch.equal(y, dropout(x, **other))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    """20000 draws: four standard deviations are below 0.0142."""
    y = dropout(torch.ones(100, 200), p, seed=11)
    assert abs((y == 0).double().mean().item() - p) < 0.0142
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_the_ends_of_p_and_special_values():
    x = torch.full((4, 8), torch.nan)
    x[0] = torch.inf
    assert torch.equal(dropout(x, 0.0, seed=1).nan_to_num(), x.nan_to_num())
    assert torch.equal(dropout(x, 0.3, seed=1, training=False).nan_to_num(), x.nan_to_num())
    assert torch.equal(dropout(x, 1.0, seed=1), torch.zeros(4, 8))
    kept = keep_mask(x, torch.tensor(1), None, 0.5)
    y = dropout(x, 0.5, seed=1)
    assert torch.equal(y[~kept], torch.zeros_like(y[~kept]))
    assert y[1:][kept[1:]].isnan().all()


def test_the_gradient_has_the_same_mask():
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    r = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.4, residual=r, seed=5)
    kept = keep_mask(x, torch.tensor(5), None, 0.4)
    torch.testing.assert_close(y, torch.where(kept, x / 0.6, 0) + r)
    dx, dr = torch.autograd.grad(y.sum(), (x, r))
    torch.testing.assert_close(dx, kept.double() / 0.6)
    assert torch.equal(dr, torch.ones_like(r))
    assert torch.autograd.gradgradcheck(lambda x, r: dropout(x * x, 0.4, residual=r, seed=5), (x, r))


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_that_changes_before_the_backward_is_refused(device):
    seed = torch.tensor(3, device=device)
    y = dropout(torch.ones(4, 4, device=device, requires_grad=True), seed=seed, backend="triton")
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_seeds_elsewhere_are_refused():
    with pytest.raises(InputError, match=r"seed is torch.int32 \(\) on cpu; needs an int, or int64 \(\) on cpu"):
        dropout(torch.ones(4), seed=torch.tensor(1, dtype=torch.int32))
    with pytest.raises(InputError, match="seed is torch.int64 .* on meta"):
        dropout(torch.ones(4), seed=torch.empty((), dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_block_sizes_are_no_part_of_the_mask(device, dtype):
    from tilewright.ops.reduction.kernels.triton import dropout as kernels

    x, residual = (torch.randn(7, 331, device=device).to(dtype) for _ in range(2))
    seed = torch.tensor(2**40 + 9, device=device)
    for offset, p in ((None, 0.25), (torch.tensor(-3, device=device), 0.8), (None, 0.0), (None, 1.0)):
        args = DropoutArgs(x, residual, seed, offset, p)
        expected = dropout(x, p, residual=residual, seed=seed, offset=0 if offset is None else offset, backend="torch")
        for config in (kernels.Config(512, 1), kernels.Config(1024, 4)):
            y = torch.full_like(x, 7.0)
            kernels.launch((y,), args, config)
            torch.testing.assert_close(y, expected)
            bare = torch.full_like(x, 7.0)
            kernels.launch((bare,), args._replace(residual=None), config)
            assert torch.equal(bare != 0, keep_mask(x, seed, offset, p) & (x != 0))
