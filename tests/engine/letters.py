"""A fast tokenizer, such as grammars need, for the tiny models."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 1


def letters():
    """A fast tokenizer of one printable character a token."""
    alphabet = ["<unk>", "<end>", "Ġ", "Ċ", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(alphabet)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
