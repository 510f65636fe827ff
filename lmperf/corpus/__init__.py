"""From any text to memory-mapped token datasets: sources, reading, shards, tokenizer, datasets."""
