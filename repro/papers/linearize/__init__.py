"""Paper 003, linearising vision transformers by test-time training (T5)."""
