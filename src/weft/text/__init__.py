"""Text before and after the model: tokenizer, streaming detokenizer, stop strings and chat templates; no tensors."""
