"""Text to micro-batches: indexed dataset, tokenizers, preprocessing, sample order, loader."""
