"""Continuous batching with "paged|tilewright" gives the tokens of `generate`, and reads keys where they lie."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.batching import LENGTHS, NAME, NEW_TOKENS, Watch, alone, batched, batching, greedy, prompts, supported
from tests.models.zoo import build, tokens
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.models import transformers_names
from tilewright.models.attention.paged import attend_paged, pages_of
from tilewright.ops import fmha

MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
PAGE = 4


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GiB, which transformers asks psutil for."""
    from transformers.generation.continuous_batching import cache

    amounts = torch.device("cpu"), 1 << 30, 0, 0
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda *_: amounts)


@supported
@pytest.mark.parametrize("tables", [0, 16], ids=["slots", "tables"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_tokens(name: str, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prefill beside decoding; decode steps alone have block tables where a request asks for them."""
    model, texts = build(name), prompts()
    expected = alone(model, "sdpa", texts)
    assert batched(model, "paged|sdpa", texts) == expected
    watch = Watch(monkeypatch)
    assert batched(model, NAME, texts, tables) == expected
    assert max(watch.calls) == 24 < max(LENGTHS)
    assert any(given for _, given in watch.steps) == bool(tables)
    assert len(watch.calls) == 2 * len(watch.steps)  # both layers share them


@supported
@pytest.mark.skipif(not transformers_names.has_right_windows(), reason="refused: their cache returns wrong keys")
@pytest.mark.parametrize(
    ("name", "own", "theirs"),
    [
        ("mistral", "sdpa", "paged|sdpa"),
        ("gemma3", "sdpa", "paged|sdpa"),
        ("gemma2", "eager", None),  # theirs leave the soft cap out
        ("gpt_oss", "eager", "paged|eager"),
    ],
)
def test_windows(name: str, own: str, theirs: str | None) -> None:
    """Past the window of 8, soft caps and sinks included; layers of both kinds but in Mistral."""
    model, texts = build(name, **({} if name == "mistral" else MIXED)), prompts()
    expected = alone(model, own, texts)
    if theirs is not None:
        assert batched(model, theirs, texts) == expected
    assert batched(model, NAME, texts) == expected


@supported
def test_keys_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with full attention ask the cache for keys only where it has none to give."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    model, read, update = build("llama"), [], PagedAttentionCache.update

    def watched(self: Any, *args: Any) -> Any:
        read.append(args[3][0].numel())
        return update(self, *args)

    monkeypatch.setattr(PagedAttentionCache, "update", watched)
    batched(model, NAME, prompts())
    assert set(read) == {0}


@supported
def test_more_requests_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve pages hold one of the requests, or parts of two; others wait or are begun again."""
    model, texts = build("llama"), prompts((30, 31, 29, 28))
    watch = Watch(monkeypatch)
    assert batched(model, NAME, texts, num_blocks=12) == alone(model, "sdpa", texts)
    assert all(step.lengths is None or step.lengths.shape[0] < len(texts) for step, _ in watch.steps)


@supported
def test_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin alike read the pages of the first: fewer tokens are computed than they have."""
    model, first = build("llama"), tokens(1, 16, seed=9)[0].tolist()
    texts = [first + rest for rest in prompts((3, 5, 7))]
    watch = Watch(monkeypatch)
    assert batched(model, NAME, texts, max_requests_per_batch=1) == alone(model, "sdpa", texts)
    computed = sum(watch.calls) // 2
    assert computed == sum(len(text) + NEW_TOKENS - 1 for text in texts) - 2 * len(first)


@supported
@pytest.mark.parametrize("name", ["tilewright", "tilewright_measured", "tilewright_torch"])
def test_plain_names(name: str) -> None:
    """Continuous batching puts "paged|" before the name that a model, or its patch, has, and takes it away after."""
    model, texts = build("llama"), prompts()
    model.set_attn_implementation(name)
    results = model.generate_batch(texts, generation_config=greedy(), continuous_batching_config=batching())
    assert [each.generated_tokens for each in results.values()] == alone(model, "sdpa", texts)


@pytest.mark.skipif(transformers_names.takes_paged_names(), reason="releases up to 5.18 take the name")
@pytest.mark.filterwarnings("ignore:The `paged|` prefix is no longer needed")
def test_greedy_is_refused_by_name() -> None:
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="tilewright is not supported for continuous batching"):
        model.generate_batch(prompts(), generation_config=greedy(), continuous_batching_config=batching())


@pytest.mark.skipif(transformers_names.has_right_windows(), reason="5.16 returns the keys of a window")
def test_windows_are_refused_where_their_cache_is_wrong() -> None:
    cache = Paged()
    cache.sliding_windows = {0: 8}
    x = torch.randn(1, 2, 7, 8)
    with pytest.raises(InputError, match="transformers 5.14 and 5.15 hands wrong keys"):
        attend_paged(SimpleNamespace(layer_idx=0), x, x, x, None, **cache.batch())  # type: ignore[arg-type]


def test_forward_is_refused() -> None:
    model = build("llama")
    model.config._attn_implementation = NAME
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match='without a paged cache.*set_attn_implementation\\("tilewright"\\)'):
        attend_paged(nn.Module(), x, x, x, None)
    if transformers_names.takes_paged_names():
        with pytest.raises(InputError, match="without a paged cache"):
            model(tokens())


# The function itself --------------------------------------------------------------------------------------------------


class Paged:
    """One layer's 12 pages of 4 tokens, 2 heads of 8; sequences of 6, 9 and 1 keys, the last 2, 4 and 1 of them new."""

    lengths, new = (6, 9, 1), (2, 4, 1)
    table = ((3, 7, -1), (5, 0, 9), (2, -1, -1))

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.key_cache, self.value_cache = [torch.randn(12 * PAGE, 2, 8)], [torch.randn(12 * PAGE, 2, 8)]
        self.block_size, self.num_key_value_heads, self.head_dim = PAGE, 2, 8
        self.layer_index_to_group_indices, self.sliding_windows = {0: (0, 0)}, {0: 1}

    def slots(self, sequence: int, first: int = 0) -> list[int]:
        pages = self.table[sequence]
        return [pages[i // PAGE] * PAGE + i % PAGE for i in range(first, self.lengths[sequence])]

    def batch(self, padding: int = 0) -> dict[str, Any]:
        """What transformers passes.  padding: tokens, sequences and slots as for a CUDA graph."""
        read = [slot for b in range(3) for slot in self.slots(b)] + [11 * PAGE] * (40 * bool(padding))
        return {
            "cache": self,
            "cu_seq_lens_q": starts(self.new, padding),
            "cu_seq_lens_k": starts(self.lengths, padding),
            "max_seqlen_q": sum(self.new) + padding if padding else max(self.new),
            "max_seqlen_k": 16 if padding else max(self.lengths),
            "read_index": [torch.tensor(read)],
            "write_index": [torch.tensor([])],
            "block_table": None,
        }


def starts(lengths: tuple[int, ...], empty: int) -> Tensor:
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends, ends[-1:].expand(empty)))


@pytest.mark.parametrize("padding", [0, 5])
def test_pages_hold_what_was_attended_to(padding: int) -> None:
    """Every sequence as if it were alone; other slots of the cache stay, and padding is 0."""
    cache = Paged()
    module, count = SimpleNamespace(layer_idx=0), sum(cache.new)
    before = cache.key_cache[0].clone(), cache.value_cache[0].clone()
    q, k, v = (torch.randn(1, heads, count + padding, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    options: dict[str, Any] = {"scaling": 0.5, "softcap": 5.0, "s_aux": sinks}
    o, _ = attend_paged(module, q, k, v, None, **options, **cache.batch(padding))  # type: ignore[arg-type]
    assert o.shape == (1, count + padding, 4, 8)
    written, first = [], 0
    for b, (length, new) in enumerate(zip(cache.lengths, cache.new, strict=True)):
        slots, rows = cache.slots(b), slice(first, first + new)
        for kept, x in zip((*cache.key_cache, *cache.value_cache), (k, v), strict=True):
            torch.testing.assert_close(kept[cache.slots(b, length - new)], x[0, :, rows].transpose(0, 1))
        keys, values = (kept[slots].transpose(0, 1)[None] for kept in (cache.key_cache[0], cache.value_cache[0]))
        expected = fmha(q[:, :, rows], keys, values, causal=True, scale=0.5, softcap=5.0, sinks=sinks)
        torch.testing.assert_close(o[:, rows].transpose(1, 2), expected)
        written += cache.slots(b, length - new)
        first += new
    others = [slot for slot in range(12 * PAGE) if slot not in written]
    assert torch.equal(cache.key_cache[0][others], before[0][others])
    assert torch.equal(cache.value_cache[0][others], before[1][others])
    assert o[:, count:].abs().sum() == 0


def test_pages_of_slots() -> None:
    """A padding slot or a slot of another sequence is behind the last page of each, and none is out of range."""
    cache = Paged()
    batch = cache.batch(padding=2)
    table = pages_of(batch["read_index"][0], batch["cu_seq_lens_k"], 9, PAGE)
    assert table.dtype == torch.int32
    assert table.shape == (5, 3)
    for b, length in enumerate(cache.lengths):
        pages = -(-length // PAGE)
        assert table[b, :pages].tolist() == list(cache.table[b][:pages])


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"dropout": 0.1}, "dropout is 0.1"), ({"position_bias": torch.zeros(1)}, "position_bias")],
    ids=["dropout", "position_bias"],
)
def test_refused_arguments(extra: dict[str, Any], words: str) -> None:
    x = torch.randn(1, 2, 7, 8)
    with pytest.raises(InputError, match=words):
        attend_paged(SimpleNamespace(layer_idx=0), x, x, x, None, **extra, **Paged().batch())  # type: ignore[arg-type]
