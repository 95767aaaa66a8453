"""Log-probabilities over HTTP, in the form that evaluation harnesses read, and several answers to one prompt."""

import pytest
import torch
from tests.serve.running import Letters, Running, engine_of

from tilewright.engine import Output, SamplingParams
from tilewright.serve.logprobs import completion_logprobs

PROMPT = [3, 40, 99, 7, 56, 21]


@pytest.fixture(scope="module")
def running():
    running = Running(engine_of())
    yield running
    running.close()


@pytest.fixture
def client(running):
    from openai import OpenAI

    with OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def rows(running, tokens):
    model = running.engine._model.model
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def letters(tokens):
    return [Letters().decode([token]) for token in tokens]


@pytest.mark.parametrize("new", [0, 1, 3])
def test_a_prompt_is_echoed_with_its_log_probabilities(running, client, new):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": new, "temperature": 0}
    choice = client.completions.create(**options, echo=True, logprobs=2).choices[0]
    drawn = running.engine.generate(PROMPT, SamplingParams(max_tokens=new))[0].tokens if new else []
    tokens, logprobs = PROMPT + drawn, choice.logprobs
    assert choice.text == "".join(letters(tokens))
    assert logprobs.tokens == letters(tokens)
    assert logprobs.text_offset == list(range(len(tokens)))
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    for place, row in enumerate(rows(running, tokens)[:-1], 1):
        assert logprobs.token_logprobs[place] == pytest.approx(row[tokens[place]].item(), abs=2e-5)
        top = logprobs.top_logprobs[place]
        assert top[letters(tokens)[place]] == logprobs.token_logprobs[place]
        assert max(top.values()) == pytest.approx(row.max().item(), abs=2e-5), "by which a harness sees a greedy token"


def test_the_request_of_an_evaluation_harness(running):
    """lm-eval's `local-completions`: prompts of tokens, one more token each, and what it reads of the answer."""
    likely = running.engine.generate([7], SamplingParams(max_tokens=2))[0].tokens
    contexts, endings = [[3, 40, 99], [7], [56, 21, 8, 2]], [[7, 56], likely, [9]]
    prompts = [a + b for a, b in zip(contexts, endings, strict=True)]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    code, answer = running.ask("/v1/completions", body | {"echo": True})
    assert code == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, context, prompt in zip(answer["choices"], contexts, prompts, strict=True):
        behind = slice(len(context), -1)
        values, tops = choice["logprobs"]["token_logprobs"][behind], choice["logprobs"]["top_logprobs"][behind]
        table, places = rows(running, prompt), range(len(context) - 1, len(prompt) - 1)
        assert sum(values) == pytest.approx(sum(table[i, prompt[i + 1]].item() for i in places), abs=1e-4)
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert is_greedy == all(table[i].argmax() == prompt[i + 1] for i in places) == (context == [7])


def test_an_echo_alone(client):
    choice = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("abc", None, "length")


def test_alternatives_of_a_chat(client):
    turns = [{"role": "user", "content": "hello"}]
    options = {"model": "tiny", "messages": turns, "max_tokens": 4, "temperature": 0, "logprobs": True}
    for entry in client.chat.completions.create(**options, top_logprobs=3).choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=2e-5)


def test_several_answers_to_each_prompt(running, client):
    options = {"model": "tiny", "max_tokens": 8, "temperature": 1.5}
    answer = client.completions.create(**options, prompt=["one", "two"], n=3, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        prompt, seed = ("one", "two")[index // 3], 7 + index % 3
        assert choice.text == client.completions.create(**options, prompt=prompt, seed=seed).choices[0].text
    assert len({choice.text for choice in client.completions.create(**options, prompt="x", n=3).choices}) == 3
    streamed = list(client.completions.create(**options, prompt="one", n=3, seed=7, stream=True))
    for index in range(3):
        text = "".join(c.text for event in streamed for c in event.choices if c.index == index)
        assert text == answer.choices[index].text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "echo=true alone"),
        ({"echo": True, "stream": True}, "whole answers alone"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n: "),
        ({"n": 129}, "n: "),
    ],
)
def test_what_is_refused(running, options, match):
    code, answer = running.ask("/v1/completions", {"prompt": "x"} | options)
    assert code == 400 and match in answer["error"]["message"]


def test_tokens_with_one_text_and_without_a_probability():
    output = Output([1], [2, 28], "cc", "length", [-1.0, -float("inf")], 0, [{28: -0.5, 2: -1.0}, {3: 0.0}])
    logprobs = completion_logprobs(Letters(), output, echo=False)
    assert logprobs["token_logprobs"] == [-1.0, -9999.0], "JSON has no infinity"
    assert logprobs["top_logprobs"] == [{"c": -0.5}, {"d": 0.0, "c": -9999.0}]
