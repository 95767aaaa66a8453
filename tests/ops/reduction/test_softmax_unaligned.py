"""Softmax of rows that begin at any element: every form, around vectors and tiles, in poisoned memory."""

import pytest
import torch
from tests.ops.unaligned import DEVICES, LENGTHS, POISON, ROWS, accesses, filled, poisoned, untouched

from tilewright.ops.reduction.softmax import SoftmaxArgs, SoftmaxBackwardArgs
from tilewright.ops.rows import RowsBucket

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture
def kernels():
    from tilewright.ops.reduction.kernels.triton import softmax_unaligned

    return softmax_unaligned


@pytest.fixture
def plain_calls(kernels, monkeypatch):
    """Calls that the plain kernels got."""
    seen = []
    for name in ("forward", "backward"):
        launch = getattr(kernels.plain, name)

        def watched(*args, launch=launch, forms, **options):
            if forms is kernels.plain.ALIGNED:
                seen.append(args)
            launch(*args, forms=forms, **options)

        monkeypatch.setattr(kernels.plain, name, watched)
    return seen


@pytest.fixture
def forms(kernels):
    config = kernels.UnalignedConfig
    return {
        "short": config(2048, num_warps=4),
        "short, rows in one tile": config(2048, num_warps=4, rows=4),
        "long": config(256, num_warps=1, steps=1),
        "long, steps prefetched": config(256, num_warps=1, steps=1, num_stages=3),
        "split": config(256, num_warps=1, split=128),
    }


def limits(dtype):
    return {"rtol": 1e-5 if dtype is torch.float32 else 2.0**-7, "atol": 1e-8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_form_at_every_length(kernels, forms, plain_calls, device, dtype):
    for n in LENGTHS:
        x = torch.randn(ROWS, n, device=device).to(dtype)
        rows, expected = filled(x), torch.softmax(x.double(), -1)
        for name, config in forms.items():
            memory, y = poisoned((ROWS, n), dtype, device)
            kernels.launch((y,), SoftmaxArgs(rows), config)
            text = f"{name}, N={n}"
            torch.testing.assert_close(y.double(), expected, **limits(dtype), msg=lambda m, t=text: f"{t}: {m}")
            assert untouched(memory, y), f"{text}: wrote outside"
    assert len(plain_calls) == len(forms) * sum(n % 16 == 0 for n in LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_form_of_the_backward_at_every_length(kernels, forms, plain_calls, device, dtype):
    for n in LENGTHS:
        y = torch.softmax(torch.randn(ROWS, n, device=device) * 3, -1).to(dtype)
        dy = torch.randn(ROWS, n, device=device).to(dtype)
        wide, grads = y.double(), dy.double()
        expected = wide * (grads - (grads * wide).sum(-1, keepdim=True))
        for name, config in forms.items():
            memory, dx = poisoned((ROWS, n), dtype, device)
            kernels.launch_backward((dx,), SoftmaxBackwardArgs(filled(dy), filled(y)), config._replace(split=0))
            text = f"{name}, N={n}"
            torch.testing.assert_close(
                dx.double(), expected, rtol=2.0**-7, atol=1e-6, msg=lambda m, t=text: f"{t}: {m}"
            )
            assert untouched(memory, dx), f"{text}: wrote outside"
    assert len(plain_calls) == len(forms) * sum(n % 16 == 0 for n in LENGTHS)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter's maximum
@pytest.mark.parametrize("device", DEVICES)
def test_special_values_in_head_body_and_tail(kernels, forms, device):
    n = 517  # row i begins 5 * i elements behind a boundary
    x = torch.randn(ROWS, n, device=device)
    x[1, 3:] = -torch.inf  # only the head is visible
    x[2, : n - 1] = -torch.inf  # only the tail
    x[3, 0] = torch.nan
    x[4, n - 1] = torch.nan
    x[5, :] = -torch.inf  # nothing: NaN
    x[6, 0] = torch.inf
    x[7, n - 1] = 90.0  # the tail takes all
    x[8, ::2] = -torch.inf
    for name, config in forms.items():
        y = torch.full_like(x, POISON)
        kernels.launch((y,), SoftmaxArgs(x), config)
        expected = torch.softmax(x.double(), -1)
        torch.testing.assert_close(
            y.double(), expected, rtol=1e-5, atol=1e-12, equal_nan=True, msg=lambda m, t=name: f"{t}: {m}"
        )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_apart_in_memory(kernels, forms, plain_calls, device):
    """Where rows lie 8 elements more apart than they are long they still begin as the result does; else plain."""
    n = 345
    x = torch.randn(ROWS, n, device=device).bfloat16()
    expected = torch.softmax(x.double(), -1)
    for pitch, is_plain in ((n + 8, False), (n + 7, True), (352, True)):
        for config in forms.values():
            plain_calls.clear()
            memory, y = poisoned((ROWS, n), x.dtype, device)
            kernels.launch((y,), SoftmaxArgs(filled(x, pitch)), config)
            assert bool(plain_calls) == is_plain
            torch.testing.assert_close(y.double(), expected, **limits(x.dtype))
            assert untouched(memory, y)


@pytest.mark.parametrize("device", DEVICES)
def test_results_that_begin_elsewhere_are_the_plain_kernels(kernels, forms, plain_calls, device):
    x = torch.randn(ROWS, 345, device=device).bfloat16()
    for config in forms.values():
        y = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape)
        kernels.launch((y,), SoftmaxArgs(x), config)
        torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), **limits(x.dtype))
    assert len(plain_calls) == len(forms)


def test_only_lengths_that_the_compiler_cannot_see_through(kernels):
    for n, taken in ((255, False), (256, False), (257, True), (264, True), (50257, True), (50304, False)):
        assert (kernels.configure(RowsBucket(2048, n), torch.bfloat16) is not None) == taken
        assert (kernels.configure_backward(RowsBucket(2048, n), torch.bfloat16) is not None) == taken
        assert bool(kernels.candidates(RowsBucket(2048, n), torch.bfloat16)) == taken


@pytest.mark.compile
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("n", [501, 5001, 50257, 128257])
def test_bodies_are_loaded_and_stored_by_16_bytes(kernels, n, backward):
    from tests.harness.fake_driver import target

    x = torch.empty(4096, n, dtype=torch.bfloat16, device="meta")
    choose = kernels.configure_backward if backward else kernels.configure
    config = choose(RowsBucket(4096, n), x.dtype)
    with target("sm_90") as compiled:
        if backward:
            kernels.launch_backward((x,), SoftmaxBackwardArgs(x, x), config)
        else:
            kernels.launch((x,), SoftmaxArgs(x), config)
    (kernel,) = compiled
    found = accesses(kernel.asm["ptx"])
    assert found["ld v4.b32"] >= (2 if backward else 1)
    assert found["st v4.b32"] >= 1
    assert set(found) == {"ld v4.b32", "ld b16", "st v4.b32", "st b16"}, "edges alone go by the element"


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_candidates_are_right_at_the_size_they_are_for(kernels, backward):
    for m, n in ((300, 501), (300, 4097), (140, 50257), (300, 50257), (260, 128257), (3, 50257)):
        x, dy = (torch.randn(m, n, device="cuda").bfloat16() for _ in range(2))
        y = torch.softmax(x, -1)
        wide, grads = y.double(), dy.double()
        expected = wide * (grads - (grads * wide).sum(-1, keepdim=True)) if backward else torch.softmax(x.double(), -1)
        space = kernels.candidates_backward if backward else kernels.candidates
        choose = kernels.configure_backward if backward else kernels.configure
        for config in (choose(RowsBucket(m, n), x.dtype), *space(RowsBucket(m, n), x.dtype)[::3]):
            memory, out = poisoned((m, n), x.dtype, "cuda")
            if backward:
                kernels.launch_backward((out,), SoftmaxBackwardArgs(dy, y), config)
            else:
                kernels.launch((out,), SoftmaxArgs(x), config)
            torch.testing.assert_close(
                out.double(), expected, rtol=2.0**-7, atol=1e-6, msg=lambda t, at=(m, n, config): f"{at}: {t}"
            )
            assert untouched(memory, out)
