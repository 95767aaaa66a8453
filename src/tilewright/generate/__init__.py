"""Decoding for Hugging Face models: a static cache and, on a GPU, one CUDA-graph replay a token.

decoder = StaticDecoder(model, max_length=4096)
ids = decoder.generate(input_ids, max_new_tokens=128)

attachment = attach_generate(model)      # model.generate now decodes this way where it can
attachment.undo()
"""

from tilewright.generate.hook import Attachment, attach_generate
from tilewright.generate.sampling import Sampling
from tilewright.generate.static import StaticDecoder

__all__ = ["Attachment", "Sampling", "StaticDecoder", "attach_generate"]
