"""The room of "Test-Time Training with KV Binding Is Secretly Linear Attention"."""
