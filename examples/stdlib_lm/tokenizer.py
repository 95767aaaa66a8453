"""A byte-level BPE tokenizer, trained by Hugging Face `tokenizers` on the training part alone.

Byte level means that any text round-trips exactly and no token is unknown. 4096 entries keep the tied embedding near a
quarter of the parameters; a run of spaces is one token, so indentation costs little.
"""

from typing import Any

import torch
from data import SourceFile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END = "<|endoftext|>"  # stands before every file; also the padding token
END_ID = 0


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """Learn the merges; a small corpus may end with fewer than VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([file.text for file in files], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: list[SourceFile]) -> torch.Tensor:
    """One stream of token ids, (tokens,) int64: END, first file, END, second file, ..."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([file.text for file in files], add_special_tokens=False):
        stream += [END_ID, *encoding.ids]
    return torch.tensor(stream, dtype=torch.int64)


def for_transformers(tokenizer: Tokenizer, context: int) -> Any:
    """The same tokenizer as transformers knows it, ready for `save_pretrained`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
