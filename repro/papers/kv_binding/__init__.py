"""Paper 004: "Test-Time Training with KV Binding Is Secretly Linear Attention"."""
