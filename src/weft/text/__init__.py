"""Text on both sides of the model: tokenizer, streaming detokenizer, stop strings and chat templates; no tensors."""
