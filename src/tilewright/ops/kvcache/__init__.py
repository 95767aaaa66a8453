"""The KV cache of decoding: pages of keys and values, and the ops that write, copy and read them."""
