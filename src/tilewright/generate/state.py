"""Device buffers that carry the state of one decode step to the next.

A captured step reads and writes these tensors and no others, so they are allocated once and only ever written in place.

  report        (2 + B,) int64      [some row still runs, length of the sequence, the newest token of each row]
  tokens        (B, 1) int64        a view of the report's tail: the tokens the next step reads
  position_ids  (B, 1) int64        their rotary positions: the cursor's position without left padding
  sequence      (B, max_length)     prompt and everything generated
  finished      (B,) bool           rows that have produced an end-of-text token
"""

from collections.abc import Sequence

import torch

from tilewright.errors import InputError
from tilewright.generate.cache import Cursor

_MAX_EOS = 32
_NO_TOKEN = -1


class DecodeState:
    """Buffers of one decoder. A prompt (`start`) and a chosen token (`commit`) change them."""

    def __init__(self, cursor: Cursor, batch_size: int, max_length: int) -> None:
        device = cursor.position.device
        self.cursor = cursor
        self.report = torch.zeros(2 + batch_size, dtype=torch.int64, device=device)
        self.running, self.length = self.report[:1], self.report[1:2]
        self.tokens = self.report[2:].view(batch_size, 1)
        self.position_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.sequence = torch.zeros(batch_size, max_length, dtype=torch.int64, device=device)
        self.finished = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self._eos = torch.full((_MAX_EOS,), _NO_TOKEN, dtype=torch.int64, device=device)
        self._pad = torch.zeros(1, dtype=torch.int64, device=device)
        self._loaded: tuple[object, ...] = ()

    def load_special_tokens(self, eos: Sequence[int], pad: int) -> None:
        """Stop a row at any token of `eos`, then continue it with `pad`."""
        if (tuple(eos), pad) == self._loaded:
            return  # filling the buffers would synchronise
        if len(eos) > _MAX_EOS:
            raise InputError(f"at most {_MAX_EOS} end-of-text tokens, got {len(eos)}")
        self._eos.copy_(torch.tensor([*eos, *[_NO_TOKEN] * (_MAX_EOS - len(eos))]))
        self._pad.fill_(pad)
        self._loaded = (tuple(eos), pad)

    def start(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Set the state for a prompt (B, S). Returns mask or None, and position_ids (1 or B, S), for its forward.

        Checking a mask synchronises once; without a mask nothing does.
        """
        length = input_ids.shape[1]
        mask = None if attention_mask is None else _left_padding(attention_mask, input_ids)
        self.cursor.padded = mask is not None
        if mask is None:
            self.cursor.first.zero_()
            position_ids = torch.arange(length, device=input_ids.device)[None]
        else:
            self.cursor.first.copy_(length - mask.sum(-1))
            position_ids = (mask.cumsum(-1) - 1).clamp_(min=0)
        self.sequence[:, :length].copy_(input_ids)
        self.cursor.position.fill_(length - 1)
        self.position_ids.copy_(length - 1 - self.cursor.first[:, None])
        self.length.fill_(length)
        self.running.fill_(1)
        self.finished.zero_()
        return mask, position_ids

    def rewind(self) -> None:
        """Set a valid state for a step whose results are not used (warm-up before a capture)."""
        self.cursor.first.zero_()
        self.cursor.position.zero_()
        self.tokens.zero_()
        self.position_ids.zero_()

    def commit(self, chosen: torch.Tensor) -> None:
        """Append one token a row, (B,) int64, and advance. The length stops growing when the last row has ended."""
        token = torch.where(self.finished, self._pad, chosen)
        self.cursor.position.add_(1)
        self.position_ids.add_(1)
        self.sequence.index_copy_(1, self.cursor.position, token[:, None])
        self.tokens.copy_(token[:, None])
        self.length.add_(self.running)
        self.finished.logical_or_((token[:, None] == self._eos).any(-1))
        self.running.copy_(self.finished.logical_not().any())


def _left_padding(attention_mask: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor | None:
    """The mask as (B, S) int64, None when nothing is padded. InputError unless each row is zeros, then ones."""
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}: must agree"
        )
    mask = attention_mask.to(input_ids.device, torch.int64).ne(0)
    first = mask.shape[1] - mask.sum(-1)
    expected = torch.arange(mask.shape[1], device=mask.device) >= first[:, None]
    is_left_padding, padded = torch.stack(((mask == expected).all() & mask[:, -1].all(), first.any())).tolist()
    if not is_left_padding:
        raise InputError(
            "attention_mask must be left padding: zeros, then ones up to the last column. "
            'Tokenize with padding_side="left", or use model.generate().'
        )
    return mask.long() if padded else None
