"""A model folder without prompts or inputs: opened as what it says it is, and run on what its class asks for."""

import pytest
import torch
from tests.assistant.planted import tiny_llama

from tilewright.assistant.inputs import ROWS, TEXTS, make
from tilewright.assistant.load import load
from tilewright.assistant.workload import workload
from tilewright.errors import UsageError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SMALL, "vocab_size": 99}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 99}
WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20, "vocab_size": 99,
    "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
WAVE = {**SMALL, "vocab_size": 12, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
KINDS = {
    "BertModel": ("Bert", BERT, {"input_ids", "attention_mask"}),
    "BertForSequenceClassification": ("Bert", BERT, {"input_ids", "attention_mask"}),
    "ViTForImageClassification": ("ViT", {**SMALL, "image_size": 32, "patch_size": 16}, {"pixel_values"}),
    "T5ForConditionalGeneration": ("T5", T5, {"input_ids", "attention_mask", "decoder_input_ids"}),
    "WhisperForConditionalGeneration": ("Whisper", WHISPER, {"input_features", "decoder_input_ids"}),
    "Wav2Vec2ForCTC": ("Wav2Vec2", WAVE, {"input_values"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_opened_as_its_class_and_runs_on_what_that_takes(name, tmp_path):
    family, options, keys = KINDS[name]
    torch.manual_seed(0)
    own = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**options)).eval()
    own.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), device="cpu")
    assert type(loaded.model) is type(own)
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in loaded.model.state_dict().items())
    made = make(loaded.model)
    assert made.note.startswith("No inputs were given")
    assert set(made.inputs) == keys
    work = workload(loaded.model, made.inputs)
    assert not work.generates
    with torch.no_grad():
        work.forward(loaded.model)


def test_a_class_that_this_transformers_has_not_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertOfTomorrow"]}')
    with pytest.raises(UsageError, match="BertOfTomorrow"):
        load(str(tmp_path), device="cpu")


def test_a_language_model_gets_our_texts_or_random_tokens():
    model = tiny_llama()
    made = make(model)
    assert "random tokens" in made.note
    assert [prompt.shape for prompt in made.prompts] == [(1, 32)] * ROWS
    assert int(torch.cat(made.prompts).max()) < model.config.vocab_size
    made = make(model, tokenizer=object())
    assert "tilewright's own" in made.note
    assert made.prompts == list(TEXTS)


def test_what_cannot_be_made_is_asked_for():
    class Both(torch.nn.Module):
        def forward(self, pixel_values, input_ids):
            return pixel_values

    with pytest.raises(UsageError, match=r"Both came without inputs.*takes pixel_values, input_ids.*FILE.py:FACTORY"):
        make(Both())
