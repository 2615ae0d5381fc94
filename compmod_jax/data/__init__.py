"""Where sentence pairs come from, and how they become padded batches of token ids."""
