"""Pages of docs/masks/ are those that the table, the tiles and the committed results give, and their code runs."""

import re
from pathlib import Path

import pytest
import torch
from scripts import mask_pages

from tilewright.bench.schema import Note, Results, Row
from tilewright.ops.attention.fmha.cost import pairs
from tilewright.ops.attention.fmha.workloads import DENSE

ROOT = Path(__file__).resolve().parents[2]
PAGES = mask_pages.masks()


def _code(page: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} shows no code"
    return "\n".join(blocks)


def _row(case: str, impls: dict[str, float], peers: dict[str, float]) -> Row:
    return Row(
        op="fmha", case=case, params={}, dtype="bfloat16", direction="fwd", timing="sustained", l2="cold", impls=impls,
        chosen="cuda", peers=peers, floor_us=50.0, ratio_own=None, ratio_auto=None, eager_us=9.0, graph_us=None,
        err=0.0, err_peer=None, spread=0.0,
    )  # fmt: skip


def test_pages_are_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mask_pages.py", "--check"])
    assert mask_pages.main() == 0, capsys.readouterr().out


def test_every_mask_that_is_compared_has_a_page():
    assert {page["row"] for page in PAGES.values()} == DENSE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_mask_that_was_measured(name):
    scope: dict = {}
    exec(_code(f"masks/{name}.md").partition("q = torch.randn")[0], scope)
    text, data = scope["seen"].program("cpu")
    measured, params = mask_pages.row_mask(PAGES[name]["row"])
    assert scope["S"] == params["S"]
    assert text == measured.program("cpu")[0]
    assert torch.equal(data, measured.program("cpu")[1])


@pytest.mark.parametrize("page", ["masks.md", *(f"masks/{name}.md" for name in PAGES)])
def test_the_code_of_a_page_runs(page):
    """At the length that the page names for a CPU."""
    short, found = re.subn(r"^S = \d+  # (\d+) on a CPU$", r"S = \1", _code(page), flags=re.MULTILINE)
    assert found == (page != "masks.md")
    torch.manual_seed(0)
    exec(short, {})


@pytest.mark.parametrize("name", ["causal", "dilated", "strided", "block-sparse"])
def test_shares_are_counted(name):
    scope: dict = {}
    exec(_code(f"masks/{name}.md").partition("q = torch.randn")[0].replace("16384", "1024"), scope)
    q = torch.empty(1, 1, 1024, 1)
    found = mask_pages.shares(scope["seen"], 1024)
    tiles = scope["seen"].dense(1, 1, 1024, 1024).view(8, 128, 8, 128).float().mean((1, 3))
    assert found.allowed == pairs(q, q, scope["seen"]) / 1024**2
    assert (found.empty, found.full) == ((tiles == 0).float().mean(), (tiles == 1).float().mean())
    assert found.empty + found.partial + found.full == 1
    assert found.dense == pytest.approx(found.allowed / (1 - found.empty))


def test_what_was_measured_and_what_was_not():
    page, softcap = PAGES["prefix-lm"], PAGES["softcap"]
    rows = [
        _row(page["row"], {"cuda": 100.0, "torch": 20.0}, {"dense_mask": 250.0, "fa4": 90.0}),
        _row("1x32/8x16384x128_causal", {"cuda": 80.0, "triton": 75.0}, {}),
    ]
    refused = Note("fmha", page["row"], "bfloat16", "fwd", "flex", "Error: a | b")
    broken = Note("fmha", softcap["row"], "bfloat16", "fwd", "", "OutOfMemoryError: 1 GB")
    results = Results("attention", {"device": "a GPU"}, rows=rows, failures=[broken], left_out=[refused])
    shown = {line.what: line for line in mask_pages.lines(page, results)}
    assert shown["tilewright, cuda"][1:] == ("100.0", "1.00")
    assert shown["tilewright, triton"][1:] == ("does not run it", "")
    assert shown["torch, dense mask, memory-efficient kernel"][1:] == ("250.0", "2.50")
    assert shown["FlexAttention"][1:] == ("Error: a \\| b", "")
    assert shown["FlashAttention 4"][1:] == ("90.00", "0.90")
    assert shown["causal alone, ours"][1:] == ("75.00", "0.75")
    assert shown["no mask, ours"][1:] == (mask_pages.BEFORE, "")
    assert shown["floor"][1:] == ("50.00", "0.50")
    other = {line.what: line.us for line in mask_pages.lines(softcap, results)}
    assert other["tilewright, cuda"] == "OutOfMemoryError: 1 GB"
    assert other["torch, dense mask"] == softcap["no_dense"]
    made = mask_pages.index({"prefix-lm": page, "softcap": softcap}, {"prefix-lm": 0.5, "softcap": 0.25}, results)
    assert "| [Prefix LM](prefix-lm.md) | 50.0 % | 100.0 | 250.0 | - |" in made
    assert f"| 25.0 % | {mask_pages.BEFORE} |" in made
