"""mode="train": the head and the loss as one op; what it computes, what it leaves, and how it is undone."""

import copy
import functools
import pickle

import pytest
import torch
from tests.models.zoo import build, tokens
from torch import Tensor, nn

from tilewright.errors import InputError, VerificationError
from tilewright.models import patch
from tilewright.models.training.head import LossRecipe, _View

OPTIONS = {  # names of transformers' loss, each with a meaning
    "mean": lambda ids: {},
    "items": lambda ids: {"num_items_in_batch": torch.tensor(11)},
    "items_int": lambda ids: {"num_items_in_batch": 11},
    "shifted": lambda ids: {"shift_labels": ids.roll(3, 1)},
    "ignored_class": lambda ids: {"ignore_index": 5},
}


def masked(ids: Tensor) -> Tensor:
    """Labels of which the first ones of each row are ignored, as a prompt is."""
    labels = ids.clone()
    labels[:, :7] = -100
    return labels


def result(model: nn.Module, ids: Tensor, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    labels = options.pop("labels", None)
    loss = model(input_ids=ids, labels=masked(ids) if labels is None else labels, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_options_of_transformers(option: str) -> None:
    ids = tokens()
    options = OPTIONS[option](ids)
    if option == "ignored_class":
        options["labels"] = ids.clone().masked_fill(ids == -100, 5)
    model = build("llama").train()
    expected, gradients = result(model, ids, **options)
    patch(model, mode="train", verify=False)
    assert model(input_ids=ids, labels=masked(ids)).logits is None
    got, ours = result(model, ids, **options)
    torch.testing.assert_close(got, expected)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


FORMS = [
    ("gemma2", {"final_logit_softcapping": 0.5}, "capped by config.final_logit_softcapping"),
    ("cohere", {"logit_scale": 0.3}, "times logit_scale"),
    ("granite", {"logits_scaling": 3.0}, "divided by config.logits_scaling"),
    ("llama", {"tie_word_embeddings": True}, "lm_head,"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "options", "text"), FORMS, ids=[form[0] for form in FORMS])
def test_every_parameter_by_the_2x_rule(name: str, options: dict, text: str, dtype: torch.dtype) -> None:
    ids = tokens()
    model = build(name, **options).to(dtype).train()
    exact_loss, exact = result(copy.deepcopy(model).double(), ids)
    theirs_loss, theirs = result(model, ids)
    p = patch(model, mode="train", ops=["loss"], verify=False)
    assert text in next(row.text for row in p.report().rows if row.kind == "loss")
    ours_loss, ours = result(model, ids)
    floor = torch.finfo(dtype).eps
    assert abs(ours_loss - exact_loss) <= 2 * abs(theirs_loss - exact_loss) + floor * abs(exact_loss)
    for parameter, g in exact.items():
        assert (ours[parameter] - g).norm() <= 2 * (theirs[parameter] - g).norm() + floor * g.norm(), parameter


@pytest.mark.parametrize("cap", [30.0, 300.0])
def test_a_high_cap_is_seen(cap: float) -> None:
    rows = patch(build("gemma2", final_logit_softcapping=cap), mode="train", verify=False).report().rows
    assert any("capped by config.final_logit_softcapping" in row.text for row in rows)


def test_a_mixtures_router_loss_stays() -> None:
    ids = tokens()
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5).train()
    expected, _ = result(model, ids)
    patch(model, mode="train", verify=False)
    torch.testing.assert_close(result(model, ids)[0], expected)
    output = model(input_ids=ids, labels=ids, return_dict=False)
    assert output[1].shape == () and all(not isinstance(x, Tensor) or x.shape[-1:] != (0,) for x in output)


def test_logits_where_somebody_reads_them() -> None:
    ids = tokens()
    model = build("llama").train()
    patch(model, mode="train", verify=False)
    shape = (*ids.shape, 128)
    assert model(input_ids=ids).logits.shape == shape
    assert model(input_ids=ids, labels=ids, skip_logits=False).logits.shape == shape
    model.eval()
    assert model(input_ids=ids, labels=ids).logits.shape == shape
    kept, skipped = (model(input_ids=ids, labels=ids, skip_logits=skip) for skip in (False, True))
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, kept.loss)
    with pytest.raises(InputError, match="skip_logits=True"):
        model(input_ids=ids, skip_logits=True)


def test_labels_by_position() -> None:
    ids = tokens()
    model = build("llama").train()
    patch(model, mode="train", verify=False)
    output = model(ids, None, None, None, None, ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(input_ids=ids, labels=ids).loss)


def test_the_head_never_sees_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").train()
    patch(model, mode="train", verify=False)
    seen: list[torch.Size] = []
    forward = _View.tilewright_head

    def recorded(self: _View, hidden: Tensor) -> Tensor:
        logits = forward(self, hidden)
        seen.append(logits.shape)
        return logits

    monkeypatch.setattr(_View, "tilewright_head", recorded)
    model(input_ids=tokens(), labels=tokens())
    assert seen == [(2, 24, 0)]


def test_a_loss_of_ones_own_is_left() -> None:
    ids = tokens()
    model = build("llama").train()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    rows = [row for row in patch(model, mode="train", verify=False).report().rows if row.kind == "loss"]
    assert [(row.status, row.text) for row in rows] == [
        ("left", "its loss_function is not transformers' ForCausalLMLoss")
    ]
    later = build("llama").train()
    patch(later, mode="train", verify=False)
    later.loss_function = model.loss_function
    assert later(input_ids=ids, labels=ids).logits is not None


@pytest.mark.parametrize("spoil", ["hooks", "class"])
def test_a_head_that_is_no_plain_linear_is_left(spoil: str) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = build("llama").train()
    if spoil == "hooks":
        model.lm_head.register_forward_hook(lambda module, args, output: None)
    else:
        model.lm_head.__class__ = Adapted
    rows = [row for row in patch(model, mode="train", verify=False).report().rows if row.kind == "loss"]
    assert [row.status for row in rows] == ["left"]
    assert {"hooks": "has hooks", "class": "is Adapted"}[spoil] in rows[0].text
    assert model(input_ids=tokens(), labels=tokens()).logits is not None


def test_inference_and_ops_leave_the_loss() -> None:
    assert "loss" not in patch(build("llama"), verify=False).report().counts()
    model = build("llama").train()
    rows = patch(model, mode="train", ops=["norm"], verify=False).report().rows
    assert [row.text for row in rows if row.kind == "loss"] == ["ops.linear_cross_entropy is not in ops="]
    assert model(input_ids=tokens(), labels=tokens()).logits is not None


def test_verification_finds_a_wrong_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    build_right = LossRecipe.build

    def build_wrong(self, cls):
        right = build_right(self, cls)

        @functools.wraps(right)
        def forward(self, *args, **kwargs):
            output = right(self, *args, **kwargs)
            if output.logits is None:
                output.loss = output.loss * 1.1
            return output

        return forward

    model = build("llama")
    p = patch(model, mode="train", verify=False, ops=["loss"])
    found = p.verify(tokens()).losses
    assert found is not None and found.passed and found.parameter and "loss error" in str(found)
    p.undo()
    monkeypatch.setattr("tilewright.models.specialise._generated", {})
    monkeypatch.setattr("tilewright.models.training.losses._reproduces", lambda *_: True)
    monkeypatch.setattr(LossRecipe, "build", build_wrong)
    with pytest.raises(VerificationError, match="loss error"):
        patch(model, mode="train", ops=["loss"], inputs=tokens())
    assert model(input_ids=tokens(), labels=tokens()).logits is not None


def test_a_model_around_the_one_with_the_loss() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama")

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(input_ids=input_ids).logits
            return logits

    p = patch(Around(), mode="train", inputs=tokens())
    assert [row.path for row in p.report().rows if row.kind == "loss"] == ["inner", "inner.lm_head"]
    assert p.verify(tokens()).losses is None


def test_undo_copy_and_pickle() -> None:
    ids = tokens()
    model = build("llama").train()
    classes, expected = {name: type(m) for name, m in model.named_modules()}, result(model, ids)
    p = patch(model, mode="train", verify=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(input_ids=ids, labels=ids).logits is None
    p.undo()
    assert {name: type(m) for name, m in model.named_modules()} == classes
    again = result(model, ids)
    assert torch.equal(again[0], expected[0])
    assert all(torch.equal(again[1][name], g) for name, g in expected[1].items())


def test_attention_dropout_is_named() -> None:
    import transformers

    model = build("llama", attention_dropout=0.1)
    rows = patch(model, mode="train", backend="triton", verify=False).report().rows
    (attention,) = [row for row in rows if row.kind == "attention"]
    assert attention.status == "left"
    assert "ops.fmha[triton] does not take it: it drops weights with probability 0.1 in training" in attention.text
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.2)
    rows = patch(transformers.GPT2LMHeadModel(config), mode="train", backend="triton", verify=False).report().rows
    assert any("drops weights with probability 0.2" in row.text for row in rows)
