"""`out=` of ops with several outputs: written, returned, replayed, and refused where it does not fit."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError

Q, K, V = torch.randn(3, 4, 16), torch.randn(3, 20, 2, 16), torch.randn(3, 20, 2, 8)
LENGTHS = torch.tensor([20, 0, 7], dtype=torch.int32)


def decode(**options):
    return ops.fmha_decode(Q, K, V, LENGTHS, **options)


def pair():
    return torch.full((3, 4, 8), torch.nan), torch.full((3, 4), torch.nan)


def test_both_are_written_and_returned():
    expected = decode(return_lse=True)
    for _ in range(3):  # the second and the third are replays
        o, lse = given = pair()
        made = decode(return_lse=True, out=given)
        assert made is given
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_an_output_that_the_call_does_not_return_is_allocated():
    for _ in range(3):
        o, _ = pair()
        assert decode(out=o) is o
        assert torch.equal(o, decode())


def test_dimensions_of_tokens():
    q = Q[:, None].expand(3, 2, 4, 16).contiguous()
    o, lse = torch.empty(3, 2, 4, 8), torch.empty(3, 2, 4)
    expected = ops.fmha_decode(q, K, V, LENGTHS, return_lse=True)
    ops.fmha_decode(q, K, V, LENGTHS, return_lse=True, out=(o, lse))
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda o, lse: o, "a tensor for each that the call returns"),
        (lambda o, lse: (o,), "a tensor for each"),
        (lambda o, lse: (o, lse, lse), "a tensor for each"),
        (lambda o, lse: (o, None), "a tensor for each"),
        (lambda o, lse: (o, 1.0), r"out\[1\] is a float"),
        (lambda o, lse: (lse, o), "needs contiguous"),
        (lambda o, lse: (o, lse.T.contiguous().T), r"strides \(1, 3\); needs contiguous \(3, 4\)"),
        (lambda o, lse: (o, lse.double()), "torch.float64"),
        (lambda o, lse: (o, o.view(-1)[:12].view(3, 4)), "outputs that share memory"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_alone(change, match):
    for _ in range(2):
        decode(return_lse=True)
        decode(return_lse=True, out=pair())  # a signature of its own
        o, lse = pair()
        with pytest.raises(InputError, match=match):
            decode(return_lse=True, out=change(o, lse))
        assert o.isnan().all()
        assert lse.isnan().all()


def test_outputs_that_share_memory_are_seen_in_a_replay():
    """Their signature is that of outputs which do not."""
    memory = torch.empty(4096)
    aligned = -memory.data_ptr() // 4 % 64  # elements to the next multiple of 256 bytes
    o, lse = memory[aligned : aligned + 96].view(3, 4, 8), memory[aligned + 512 : aligned + 524].view(3, 4)
    decode(return_lse=True, out=(o, lse))
    with pytest.raises(InputError, match="share memory"):
        decode(return_lse=True, out=(o, memory[aligned + 64 : aligned + 76].view(3, 4)))


def test_memory_of_an_input_is_refused():
    with pytest.raises(InputError, match="shares memory with an input"):
        decode(return_lse=True, out=(pair()[0], K.view(-1)[:12].view(3, 4)))


def test_a_gradient_is_refused():
    with pytest.raises(InputError, match="no gradient"):
        ops.top_k(Q.view(3, 64).clone().requires_grad_(), 2, out=(torch.empty(3, 2), torch.empty(3, 2).long()))


def test_under_compile():
    torch.compiler.reset()
    compiled = torch.compile(lambda o, lse: decode(return_lse=True, out=(o, lse)), backend="aot_eager", fullgraph=True)
    o, lse = pair()
    compiled(o, lse)
    expected = decode(return_lse=True)
    torch.testing.assert_close(o, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_what_autograd_has_saved_of_an_output_is_gone():
    tokens, accepted = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    probabilities = torch.rand(2, 3, 9)
    before = tokens._version, accepted._version
    seeds, places = torch.arange(2), torch.arange(2)
    ops.verify_chain(probabilities, torch.ones(2, 2, dtype=torch.int64), seeds, places, out=(tokens, accepted))
    assert tokens._version > before[0]
    assert accepted._version > before[1]
