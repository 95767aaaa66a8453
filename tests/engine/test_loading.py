"""Engines of folders: quantised where that is asked for, with the tokenizer that lies there."""

import pytest
from tests.engine.letters import letters
from tests.models import zoo

from tilewright import Engine, quantize_
from tilewright.engine import SamplingParams
from tilewright.errors import InputError

WIDE = {"hidden_size": 512, "intermediate_size": 512}
SIZES = {"max_batch": 2, "page_size": 4, "max_context": 64}
PARAMS = SamplingParams(max_tokens=8, logprobs=True)


def test_a_folder_is_served_in_a_format_of_fewer_bits(tmp_path):
    model = zoo.build("llama", **WIDE)
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    with Engine(str(tmp_path), quantize="int4", device="cpu", **SIZES) as engine:
        output = engine.generate("text", PARAMS)[0]
        prompt = engine.tokenizer("text")["input_ids"]
    with Engine(model, **SIZES) as engine:
        wide = engine.generate(prompt, PARAMS)[0]
    quantize_(model, "int4")
    with Engine(model, **SIZES) as engine:
        expected = engine.generate(prompt, PARAMS)[0]
    assert output.tokens == expected.tokens
    assert expected.logprobs != wide.logprobs


def test_a_given_model_is_quantised_by_its_owner():
    with pytest.raises(InputError, match="quantize_"):
        Engine(zoo.build("llama"), quantize="int4", **SIZES)
